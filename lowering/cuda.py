"""Lowerings for cuda."""

from functools import partial

from ._rule import register as _register

register = partial(_register, jax_platform="cuda")
