"""Shared by benchmarks of attention over whole sequences: q, k and v with their tangents, and the cotangent of o."""

from functools import lru_cache
from typing import Any

import jax
from jax import Array

from ejkernel.types.shapes import Shape

from ._contenders import Inputs, arrays_of, normal


@lru_cache(maxsize=1)
def inputs(shape: Shape, dtype: Any) -> Inputs:
    """The arrays of a call; all except q, k and v are `others`. The last ones are cached, for its other modes."""
    arrays = arrays_of(shape, dtype)
    operands = tuple(arrays.pop(name) for name in "qkv")
    keys = jax.random.split(jax.random.key(1), 4)
    tangents = ()
    if "jvp" in shape.modes:
        tangents = tuple(normal(key, x.shape, dtype) for key, x in zip(keys[1:], operands, strict=True))
    result = (*operands[0].shape[:-1], operands[2].shape[-1])
    return Inputs(operands, normal(keys[0], result, dtype), tangents, arrays)


def heads_first(x: Any) -> Any:
    """[b,s,h,d] of torch to [b,h,s,d], and back."""
    return x.transpose(1, 2)


def without_others(function: Any) -> Any:
    """The function of q, k and v, which ignores the other arrays."""
    return lambda q, k, v, **others: function(q, k, v)


def first_group(x: Array, kv_heads: int) -> Array:
    """The heads of an array [heads, …] that share the first key/value head."""
    return x[: x.shape[0] // kv_heads]
