"""Switches off Python's search for reference cycles, which is slow while many long-lived objects are made."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A context without garbage collection of cycles.

    A lowering makes about a million objects that live until it ends, and an import makes objects that live for ever.
    Searching them repeatedly takes a tenth of the time of a lowering, and a quarter of that of importing the library.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
