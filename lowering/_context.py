"""What holds while an implementation is traced: what is set in the program around is no rule for it."""

import contextlib
import gc
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh

from ejkernel.compat import unchecked_manual_axes


@contextlib.contextmanager
def own_promotions() -> Iterator[None]:
    """What a user forbids in a program of theirs is no rule for the code of an implementation."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """The code of one device, on local arrays: there is no mesh, and nothing varies over manual axes."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), unchecked_manual_axes(), own_promotions():
        yield


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Without looking for cycles among the objects of a lowering: a million, which live until it is done.

    To look for them again and again takes a tenth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
