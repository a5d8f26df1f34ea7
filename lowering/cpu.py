"""Lowerings for cpu."""

from functools import partial

from ._rule import register as _register

register = partial(_register, jax_platform="cpu")
