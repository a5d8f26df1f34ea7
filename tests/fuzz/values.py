"""Families of numbers: normal ones, and those at which kernels fail."""

import jax.numpy as jnp
import numpy as np


def normal(rng, shape, dtype):
    return rng.standard_normal(shape)


def large(rng, shape, dtype):
    return 30 * rng.standard_normal(shape)


def huge(rng, shape, dtype):
    """Numbers whose products are far from overflow in float32, but not in float16."""
    return (300 if dtype == np.float16 else 1e4) * rng.standard_normal(shape)


def zero(rng, shape, dtype):
    return np.zeros(shape)


def subnormal(rng, shape, dtype):
    return rng.uniform(-1, 1, shape) * float(jnp.finfo(dtype).smallest_normal)


def mixed(rng, shape, dtype):
    """Numbers of very different magnitudes."""
    return rng.standard_normal(shape) * 10.0 ** rng.uniform(-4, 2, shape)


def ties(rng, shape, dtype):
    """Small integers, with several equal largest logits."""
    return rng.integers(-2, 3, shape).astype(np.float64)


def uniform(rng, shape, dtype):
    """Rows that are almost equal."""
    return 1 + 1e-3 * rng.standard_normal(shape)


def one_hot(rng, shape, dtype):
    if not shape or not shape[-1]:
        return np.ones(shape)
    return 8 * np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]


FAMILIES = {f.__name__: f for f in (normal, large, huge, zero, subnormal, mixed, ties, uniform, one_hot)}


def numbers(family: str, rng: np.random.Generator, shape: tuple[int, ...], dtype) -> np.ndarray:
    """float64 numbers of a family for some operands of a call, and normal ones for the others."""
    return FAMILIES[family if rng.random() < 0.6 else "normal"](rng, shape, dtype)
