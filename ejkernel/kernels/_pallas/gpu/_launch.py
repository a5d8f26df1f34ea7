"""What the kernels are built from: how they are launched, what their warpgroups share, and how these wait for another.

A block of threads is a few warpgroups, of which the last loads tiles from device memory and the others compute on them.
"""

import inspect
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.compat import ask_ptxas_once

# Rows that a warpgroup computes on: the height of a wgmma; and its threads.
ROWS, THREADS = 64, 128
WGMMA = plgpu.Layout.WGMMA
PER_ROW, PER_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
# Of the 16 named barriers Mosaic GPU uses those below this.
FIRST_BARRIER = 4


def launch(
    kernel: Callable, name: str, operands: tuple, out_type: Any, blocks: int, warpgroups: int, scratch: dict,
    reduction_bytes: int = 0,
):  # fmt: skip
    """Runs `kernel(*operand refs, *output refs, **scratch refs)` in `blocks` blocks of so many warpgroups.

    An operand may be a tree of arrays, and is one of refs then. `reduction_bytes` of shared memory are for maxima and
    sums over the rows of a tile, which several warps have.
    """
    ask_ptxas_once()
    arrays, tree = jax.tree.flatten(operands)

    def body(*refs):
        given = jax.tree.unflatten(tree, refs[: len(arrays)])
        pl.run_scoped(partial(kernel, *given, *refs[len(arrays) :]), **scratch, collective_axes="warpgroup")

    return pl.kernel(
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
    )(*arrays)


def shared(shape: tuple[int, ...], dtype: Any, swizzle: int | None = None):
    """A tile in shared memory, swizzled as wgmma and the tensor memory accelerator want it.

    The swizzle is the widest that divides a row. A second operand of `rows` rows, which the product sums over, takes a
    swizzle of as many numbers at most.
    """
    size = np.dtype(dtype).itemsize
    if swizzle is None:
        swizzle = next(width for width in (128, 64, 32) if shape[-1] * size % width == 0)
    tiling = plgpu.TilingTransform((8, swizzle // size))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def whole_eights(x: Array) -> Array:
    """[b, n, …] with zeros after the end up to a multiple of 8 rows, which the tensor memory accelerator counts in."""
    if x.shape[1] % 8 == 0:
        return x
    return jnp.pad(x, [(0, -x.shape[1] % 8 if axis == 1 else 0) for axis in range(x.ndim)])


def accumulator(rows: int, columns: int, dtype: Any = jnp.float32):
    return plgpu.ACC((rows, columns), dtype)


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


def in_warp(conditions: Array, layout) -> Array:
    """Whether one of the conditions that the threads of this warp have is true."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    of_all = plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=of_all)
    def emit(_, conditions):
        i32 = ir.IntegerType.get_signless(32)
        each = [vector.extract(x, [], [i]) for x in conditions.registers.flat for i in range(x.type.shape[0])]
        text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
        some = llvm.inline_asm(i32, [arith.extui(i32, reduce(arith.ori, each))], text, "=r,r", has_side_effects=True)
        return type(conditions).splat(some, (), is_signed=True)

    return emit(conditions) != 0


def times_rows(tile: Array, factors: Array) -> Array:
    """A tile times a factor for each row; a warp passes over it where all its factors are 1."""
    return lax.cond(in_warp(factors != 1, PER_ROW), lambda: tile * broadcast_rows(factors, tile), lambda: tile)


def load_vector(ref, layout, optimized: bool = True) -> Array:
    """A vector from shared memory in a layout; not `optimized`, from device memory."""
    wants_index = inspect.signature(plgpu.load).parameters.get("idx")  # in jax 0.10
    index = ((),) if wants_index is not None and wants_index.default is wants_index.empty else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def stage_of(step: Array, stages: int) -> Array:
    return lax.rem(step, jnp.int32(stages))


# ---- Named barriers: one instruction a warp, where an arrival in shared memory is one a thread


def arrive(barrier: int | Array, warpgroups: int) -> None:
    """Counts this warpgroup in, and goes on."""
    _bar("arrive", barrier, warpgroups)


def sync(barrier: int | Array, warpgroups: int) -> None:
    """Waits until `warpgroups` have come to the barrier, this one among them."""
    _bar("sync", barrier, warpgroups)


def _bar(operation: str, barrier: int | Array, warpgroups: int) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def emit(_, number):
        void = ir.Type.parse("!llvm.void")
        text = f"bar.{operation} $0, {warpgroups * THREADS};"
        llvm.inline_asm(void, [number.registers[()]], text, "r", has_side_effects=True)

    emit(jnp.int32(barrier))


# ---- What ptxas cannot see through


def opaque_barrier(weights: Array) -> None:
    """A no-op `bar.warp.sync` whose mask depends on all weights: keeps ptxas from hoisting the next product over them.

    There are no registers for both at once. The mask is that of all threads but (weights and 0), of a 0 that ptxas does
    not know: the index of a thread block along an axis of one.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    @plgpu.inline_mgpu(arg_types=(WGMMA,))
    def emit(_, weights):
        void, i32 = ir.Type.parse("!llvm.void"), ir.IntegerType.get_signless(32)
        word = ir.VectorType.get((1,), i32)
        words = [vector.extract(vector.bitcast(word, x), [], [0]) for x in weights.registers.flat]
        text = "{ .reg .b32 x; mov.u32 x, %ctaid.z; and.b32 x, x, $0; not.b32 x, x; bar.warp.sync x; }"
        llvm.inline_asm(void, [reduce(arith.ori, words)], text, "r", has_side_effects=True)

    emit(weights)


def opaque_copy(number: Array | int) -> Array:
    """A copy of a number that ptxas cannot see through: what depends on it is computed again, not kept in registers."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )
    def emit(_, number):
        i32 = ir.IntegerType.get_signless(32)
        copy = llvm.inline_asm(i32, [number.registers[()]], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        return type(number)(_registers=np.array(copy, object), _layout=number.layout, _is_signed=True)

    return emit(jnp.int32(number))
