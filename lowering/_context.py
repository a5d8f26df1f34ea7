"""Contexts in which implementations are traced, independent of the settings of the surrounding program."""

import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh

from ejkernel.compat import unchecked_manual_axes


@contextlib.contextmanager
def own_promotions() -> Iterator[None]:
    """Allows dtype promotion in the code of an implementation, even if a user forbids it in the program around."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """A context for the code of one device on local arrays: without a mesh, and without varying manual axes."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), unchecked_manual_axes(), own_promotions():
        yield
