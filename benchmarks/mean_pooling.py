"""Mean pooling beside its rivals: `python benchmarks/mean_pooling.py --modes fwd fwd_bwd`.

Every contender is judged against the formula in float64 before it is timed. The table gives the median time of a call,
TB/s, the share of the copy bandwidth measured in the same run, and how many times faster than the best rival it is.
"""

import sys
from functools import cache
from typing import Any

from _packed import gate, imported, of_jax, of_torch, run, torch_on_gpu  # isort: skip (sets what JAX reads)

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Contender, Prepared, Unavailable, measure, yardstick
from _process import earlier

from ejkernel.modules import mean_pooling
from ejkernel.types.mean_pooling import MEAN_POOLING_SHAPES, MeanPoolingShape

CONVENTION = "bytes: x read once forward, its gradient written once backward"
_PASSES = {"fwd": 1, "bwd": 1, "fwd_bwd": 2}
_OURS, _RIVAL = 3.0, 10.0
_FEATURES = 64  # that are judged
_HEAD = 128  # features of a head, where a rival wants heads


def case(shape: MeanPoolingShape, mode: str, arguments) -> list:
    """The rows of one shape and mode."""
    x, do = _inputs(shape)
    judge = cache(lambda: _gate(shape, mode, x, do))
    return measure(
        str(shape),
        mode,
        [*_contenders(shape, mode, x, do, arguments.platforms), earlier("mean_pooling", shape, mode, x.dtype)],
        lambda results: judge()(results),
        bounds=(_OURS, _RIVAL),
        work=_PASSES[mode] * x.size * x.dtype.itemsize,
        yardstick=yardstick(None),
        repeats=arguments.repeats,
    )


def of_fields(fields: dict[str, Any], mode: str, dtype: str) -> Prepared:
    """Our call of the layer with these fields."""
    shape = MeanPoolingShape(**fields)
    ours, *_ = _contenders(shape, mode, *_inputs(shape, dtype), ["auto"])
    return ours.prepare()


def _inputs(shape: MeanPoolingShape, dtype: str = "bfloat16") -> tuple[jax.Array, jax.Array]:
    """x and the cotangent of the means."""
    keys = jax.random.split(jax.random.key(0))
    normal = lambda key, *size: jax.random.normal(key, size, jnp.float32).astype(dtype)
    return normal(keys[0], shape.tokens, shape.features), normal(keys[1], shape.sequences, shape.features)


def _gate(shape: MeanPoolingShape, mode: str, x: jax.Array, do: jax.Array):
    """Judges the first features of every sequence and token."""
    ends = shape.cu_seqlens()
    lengths = np.maximum(np.diff(ends), 1)[:, None]
    owner = np.repeat(np.arange(shape.sequences), np.diff(ends))

    def formula(dtype):
        first, cotangent = (np.asarray(a[:, :_FEATURES], np.float64) for a in (x, do))
        sums = np.concatenate([np.zeros((1, _FEATURES)), np.cumsum(first, 0)])
        o, dx = (sums[ends[1:]] - sums[ends[:-1]]) / lengths, (cotangent / lengths)[owner]
        rounded = lambda a: a.astype(dtype).astype(np.float64)
        return {"fwd": [rounded(o)], "bwd": [rounded(dx)], "fwd_bwd": [rounded(o), rounded(dx)]}[mode]

    return gate(lambda results: [a.reshape(-1, shape.features)[:, :_FEATURES] for a in results], formula, x.dtype)


def _contenders(shape: MeanPoolingShape, mode: str, x: jax.Array, do: jax.Array, platforms: list[str]):
    """Ours on each platform ("auto" for the choice of the library), then the rivals."""
    ends = jnp.asarray(shape.cu_seqlens())

    def ours(platform):
        platform = None if platform == "auto" else platform
        return of_jax(lambda x: mean_pooling(x, ends, platform=platform), (x,), do, mode, "mean_pooling")

    def segment_sum():
        owner = jnp.repeat(jnp.arange(shape.sequences), jnp.diff(ends), total_repeat_length=shape.tokens)
        lengths = jnp.maximum(jnp.diff(ends), 1)[:, None]

        def function(x):
            sums = jax.ops.segment_sum(x.astype(jnp.float32), owner, shape.sequences, indices_are_sorted=True)
            return (sums / lengths).astype(x.dtype)

        return of_jax(function, (x,), do, mode)

    def linear_attention():
        torch_on_gpu()
        if not shape.even or shape.sequences == 1:
            raise Unavailable("it pools chunks of one size")
        pool = imported("fla.ops.utils.pooling").mean_pooling
        in_heads = lambda a: a.reshape(1, a.shape[0], -1, _HEAD)
        chunk = shape.tokens // shape.sequences
        return of_torch(lambda x: pool(x, chunk), (in_heads(x),), in_heads(do), mode)

    return [
        *(Contender(f"ejkernel {name}", lambda name=name: ours(name), ours=True) for name in platforms),
        Contender("jax.ops.segment_sum", segment_sum),
        Contender("fla", linear_attention),
    ]


if __name__ == "__main__":
    sys.exit(run("mean_pooling", __doc__, MEAN_POOLING_SHAPES, case, CONVENTION, "TB/s"))
