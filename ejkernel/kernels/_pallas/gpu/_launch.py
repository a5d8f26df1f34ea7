"""The pieces that the kernels are built from: the launch, tiles in shared memory, broadcasts, and named barriers.

The last warpgroup of a thread block is the producer, which loads tiles from device memory; the others are consumers.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.compat import ask_ptxas_once
from ejkernel.xla_utils.slices import aligned

from ._inline.barriers import named_barrier, warp_any
from ._inline.registers import PER_COLUMN, PER_ROW, ROWS, THREADS, WGMMA, opaque_barrier, opaque_copy

__all__ = [
    "FIRST_BARRIER",
    "PER_COLUMN",
    "PER_ROW",
    "ROWS",
    "THREADS",
    "WGMMA",
    "accumulator",
    "arrive",
    "broadcast_columns",
    "broadcast_rows",
    "either",
    "full",
    "indices",
    "launch",
    "load_vector",
    "opaque_barrier",
    "opaque_copy",
    "shared",
    "stage_of",
    "sync",
    "times_rows",
    "warp_any",
    "whole_eights",
]

# `plgpu.load` wants an index in jax 0.10; this is all of a ref.
_index = inspect.signature(plgpu.load).parameters.get("idx")
_WHOLE = ((),) if _index is not None and _index.default is _index.empty else ()
# Of 16 named barriers Mosaic GPU itself uses those below this one, where a thread block has up to three warpgroups. A
# fourth has this one, if it ever synchronises its own threads, as `commit_smem` does.
FIRST_BARRIER = 4


def launch(
    kernel: Callable, name: str, operands: tuple, out_type: Any, blocks: int, warpgroups: int, scratch: dict,
    reduction_bytes: int = 0,
):  # fmt: skip
    """Runs `kernel(*operand refs, *output refs, **scratch refs)` in `blocks` thread blocks of `warpgroups` each.

    An operand may be a tree of arrays, which the kernel gets as a tree of refs. `reduction_bytes` of shared memory are
    for maxima and sums of rows that are spread over several warps.
    """
    ask_ptxas_once()
    arrays, tree = jax.tree.flatten(operands)

    def body(*refs):
        given = jax.tree.unflatten(tree, refs[: len(arrays)])
        pl.run_scoped(partial(kernel, *given, *refs[len(arrays) :]), **scratch, collective_axes="warpgroup")

    results = pl.kernel(
        body,
        out_type=out_type,
        mesh=plgpu.Mesh(
            grid=(blocks,),
            grid_names=("block",),
            num_threads=warpgroups,
            thread_name="warpgroup",
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,  # the kernels say themselves who waits for whom
            reduction_scratch_bytes=reduction_bytes,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        name=name,
    )(*aligned(arrays))
    return aligned(results)


def shared(shape: tuple[int, ...], dtype: Any, widest: int = 128):
    """A tile in shared memory, in the swizzle that wgmma and TMA read and write.

    The swizzle is the widest that divides a row, of `widest` bytes at most. A second operand of `rows` rows, which the
    product sums over, takes a swizzle of as many numbers at most.
    """
    size = np.dtype(dtype).itemsize
    swizzle = next(width for width in (128, 64, 32) if shape[-1] * size % width == 0 and width <= widest)
    tiling = plgpu.TilingTransform((8, swizzle // size))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def whole_eights(x: Array) -> Array:
    """[b, n, …] with zeros after the end up to a multiple of 8 rows, the granularity of TMA tiles."""
    if x.shape[1] % 8 == 0:
        return x
    return jnp.pad(x, [(0, -x.shape[1] % 8 if axis == 1 else 0) for axis in range(x.ndim)])


def accumulator(rows: int, columns: int):
    return plgpu.ACC((rows, columns), jnp.float32)


def full(shape: tuple[int, ...], value, layout, dtype: Any = jnp.float32) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def indices(first: Array, axis: int, shape: tuple[int, int]) -> Array:
    """first, first + 1, … along an axis of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA) + first


def broadcast_rows(rows: Array, like: Array) -> Array:
    """A number for each row, broadcast along the columns of `like`."""
    return lax.broadcast_in_dim(rows, like.shape, [0])


def broadcast_columns(columns: Array, like: Array) -> Array:
    """A number for each column, broadcast along the rows of `like`."""
    return lax.broadcast_in_dim(columns, like.shape, [1])


def times_rows(tile: Array, factors: Array) -> Array:
    """A tile times a factor for each row; a warp skips the product where all of its factors are 1."""
    return lax.cond(warp_any(factors != 1, PER_ROW), lambda: tile * broadcast_rows(factors, tile), lambda: tile)


def load_vector(ref, layout, optimized: bool = True) -> Array:
    """Loads a vector in a layout: from shared memory, or from device memory if not `optimized`."""
    return plgpu.load(ref, *_WHOLE, layout=layout, optimized=optimized)


def either(condition: Array, first: Callable, second: Callable, *operands: Any, unused: Callable = lambda: None) -> Any:
    """first(*operands) if the condition holds, second(*operands) otherwise, as `lax.cond` has it.

    Pallas lowers the first branch of a `lax.cond` twice, to learn the types of its results. Here that is `unused`, a
    short branch with results of these types, which never runs, so that long branches are lowered once.
    """
    return lax.switch(jnp.where(condition, 2, 1), [unused, second, first], *operands)


def stage_of(step: Array, stages: int) -> Array:
    return lax.rem(step, np.int32(stages))


# ---- Named barriers: one instruction a warp, where an arrival in shared memory is one a thread


def arrive(barrier: int | Array, warpgroups: int) -> None:
    """Arrives at a named barrier without waiting: `bar.arrive`."""
    named_barrier("arrive", barrier, warpgroups)


def sync(barrier: int | Array, warpgroups: int) -> None:
    """Arrives at a named barrier and waits until `warpgroups` warpgroups have: `bar.sync`."""
    named_barrier("sync", barrier, warpgroups)
