"""Python's search for cycles among objects, which costs most where many are made that live on."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A context without garbage collection of cycles.

    The objects of a lowering are about a million, which live until it is done, and those of an import live on.
    Searching them repeatedly takes a tenth of the time of a lowering, and a quarter of that of importing the library.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
