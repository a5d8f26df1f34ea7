"""mean_pooling beside its rivals."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.modules import mean_pooling
from ejkernel.types.shapes.mean_pooling import MeanPoolingShape

from . import _referee
from ._contenders import Inputs, arrays_of, imported, normal, of_jax, of_ours, of_torch
from ._driver import Case
from ._harness import Check, Contender, Unavailable
from ._versions import of_earlier

_FEATURES = 64  # that are judged
_HEAD = 128  # features of a head, for a rival that needs heads


def case(shape: MeanPoolingShape, mode: str, dtype: Any, platforms: Sequence[str]) -> Case:
    """One call in one mode."""
    given = _inputs(shape, dtype)
    judge = cache(partial(_check, shape, mode, given))
    return Case(_contenders(shape, mode, given, platforms), judge, largest_error=3.0)


@lru_cache(maxsize=1)
def _inputs(shape: MeanPoolingShape, dtype: Any) -> Inputs:
    arrays = arrays_of(shape, dtype)
    x = arrays.pop("x")
    return Inputs((x,), normal(jax.random.key(1), (shape.sequences, shape.features), dtype), others=arrays)


def _check(shape: MeanPoolingShape, mode: str, given: Inputs) -> Check:
    """Judges the first features of every sequence and token."""
    (x,), do = given.operands, given.cotangent
    ends = shape.cu_seqlens()
    lengths = np.maximum(np.diff(ends), 1)[:, None]
    owner = np.repeat(np.arange(shape.sequences), np.diff(ends))

    def formula(dtype: Any) -> list[np.ndarray]:
        first, cotangent = (np.asarray(a[:, :_FEATURES], np.float64) for a in (x, do))
        sums = np.concatenate([np.zeros((1, _FEATURES)), np.cumsum(first, 0)])
        o, dx = (sums[ends[1:]] - sums[ends[:-1]]) / lengths, (cotangent / lengths)[owner]
        rounded = lambda a: a.astype(dtype).astype(np.float64)
        return {"fwd": [rounded(o)], "bwd": [rounded(dx)], "fwd_bwd": [rounded(o), rounded(dx)]}[mode]

    return _referee.check(
        lambda results: [a.reshape(-1, shape.features)[:, :_FEATURES] for a in results], formula, x.dtype
    )


def _contenders(shape: MeanPoolingShape, mode: str, given: Inputs, platforms: Sequence[str]) -> list[Contender]:
    """Ours on each platform ("auto" for the choice of the library), then the rivals."""

    def segment_sum(x: Array, cu_seqlens: Array) -> Array:
        lengths = jnp.diff(cu_seqlens)
        owner = jnp.repeat(jnp.arange(shape.sequences), lengths, total_repeat_length=shape.tokens)
        sums = jax.ops.segment_sum(x.astype(jnp.float32), owner, shape.sequences, indices_are_sorted=True)
        return (sums / jnp.maximum(lengths, 1)[:, None]).astype(x.dtype)

    def linear_attention() -> Callable[..., Any]:
        if not shape.even or shape.sequences == 1:
            raise Unavailable("it pools chunks of one size")
        pool = imported("fla.ops.utils.pooling").mean_pooling
        chunk = shape.tokens // shape.sequences
        return lambda x: pool(x, chunk)

    in_heads = lambda x: x.reshape(1, x.shape[0], -1, _HEAD)
    return [
        *of_ours("mean_pooling", platforms, lambda name: partial(mean_pooling, platform=name), mode, given),
        of_jax("jax.ops.segment_sum", lambda: segment_sum, mode, given),
        of_torch("fla", linear_attention, mode, Inputs((in_heads(given.operands[0]),), in_heads(given.cotangent))),
        of_earlier("mean_pooling", ("x",), {}, mode, given),
    ]
