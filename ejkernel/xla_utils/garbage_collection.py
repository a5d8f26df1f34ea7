"""Switches off Python's search for reference cycles, which is slow while many long-lived objects are made."""

import contextlib
import gc
from collections.abc import Iterator

# Python 3.12 freezes some 400 objects as it starts; a program that freezes has tens of thousands.
FROZEN_BY_PYTHON = 1000


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


def to_oldest_generation() -> None:
    """Moves all objects to the oldest generation without a search, unless the program has frozen its own.

    The objects of an import live for ever. As young ones they would all be searched next, a tenth of its time.
    """
    if gc.get_freeze_count() < FROZEN_BY_PYTHON:
        gc.freeze()
        gc.unfreeze()
