"""Votes of a warp, named barriers of warpgroups, and semaphores in device memory by which thread blocks wait."""

from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from .registers import SPLAT, THREADS


def warp_any(conditions: Array, layout) -> Array:
    """Whether a condition of any thread of this warp is true, by `vote.sync.any`; Pallas has no vote of a warp."""
    of_all = plgpu.ShapeDtypeStruct((), jnp.int32, SPLAT)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=of_all)
    def emit(_, conditions):
        i32 = ir.IntegerType.get_signless(32)
        each = [vector.extract(x, [], [i]) for x in conditions.registers.flat for i in range(x.type.shape[0])]
        text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
        some = llvm.inline_asm(i32, [arith.extui(i32, reduce(arith.ori, each))], text, "=r,r", has_side_effects=True)
        return type(conditions).splat(some, (), is_signed=True)

    return emit(conditions) != 0


def named_barrier(operation: str, barrier: int | Array, warpgroups: int) -> None:
    """`bar.arrive` or `bar.sync`: one instruction per warp, where an mbarrier of Mosaic GPU takes one per thread."""

    @plgpu.inline_mgpu(arg_types=(SPLAT,))
    def emit(_, number):
        void = ir.Type.parse("!llvm.void")
        text = f"bar.{operation} $0, {warpgroups * THREADS};"
        llvm.inline_asm(void, [number.registers[()]], text, "r", has_side_effects=True)

    emit(np.int32(barrier) if isinstance(barrier, int) else barrier)


# ---- Semaphores in device memory (flash_attention/dq_semaphore.py)


def count_of(semaphore: Any) -> Array:
    """The count of a semaphore in device memory: how many tiles of keys have added to dq of its block of queries.

    The load is asynchronous until its result is used. All threads load; those of a warp are one request.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, SPLAT))
    def emit(_, semaphore):
        i32 = ir.IntegerType.get_signless(32)
        count = _with_pointer(i32, "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l,~{memory}", semaphore)
        return fragmented_array.FragmentedArray.splat(count, (), is_signed=True)

    return emit(semaphore)


def await_rank(semaphore: Any, count: Array, rank: Array) -> None:
    """Waits until `rank` tiles have added to dq; `count` is the value of the semaphore when it was last loaded.

    The load is relaxed, because no thread reads dq: TMA adds to it in the L2 cache, after the count was read there.
    """
    text = """{
        .reg .pred p; .reg .b32 count;
        mov.b32 count, $1;
        LOOK: setp.eq.s32 p, count, $2;
        @p bra DUE;
        ld.relaxed.gpu.global.b32 count, [$0];
        bra LOOK;
        DUE: fence.proxy.async.global;
    }"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT, SPLAT))
    def emit(_, semaphore, count, rank):
        _with_pointer(None, text, "l,r,r,~{memory}", semaphore, count.registers[()], rank.registers[()])

    emit(semaphore, jnp.int32(count), jnp.int32(rank))


def count_up(semaphore: Any) -> None:
    """Increments a semaphore after the copies of this thread block to device memory are complete.

    It is relaxed: the thread that issued the copies has waited until they were performed, in the L2 cache as this is.
    A release would wait for all that its multiprocessor has under way, a tenth of the time of the backward.
    """
    text = f"""{{
        .reg .pred p; .reg .b32 t;
        mov.u32 t, %tid.x; and.b32 t, t, {THREADS - 1}; setp.eq.u32 p, t, 0;
        fence.proxy.async.global;
        @p red.relaxed.gpu.global.add.s32 [$0], 1;
    }}"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(_, semaphore):
        _with_pointer(None, text, "l,~{memory}", semaphore)

    emit(semaphore)


# ---- A counter in device memory (flash_attention/work_tiles.py)

# Of a warpgroup, the thread that counts: of the last warp, as the first one issues what TMA loads.
COUNTS = THREADS - 32
_IF_COUNTS = f"mov.u32 t, %tid.x; and.b32 t, t, {THREADS - 1}; setp.eq.u32 p, t, {COUNTS};"


def count_one(counter: Any) -> Array:
    """The value of a counter in device memory before one thread of this warpgroup added 1, in that thread alone.

    The addition is asynchronous until its result is used.
    """
    text = f"""{{
        .reg .pred p; .reg .b32 t;
        {_IF_COUNTS}
        mov.b32 $0, 0;
        @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
    }}"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, SPLAT))
    def emit(_, counter):
        before = _with_pointer(ir.IntegerType.get_signless(32), text, "=&r,l,~{memory}", counter)
        return fragmented_array.FragmentedArray.splat(before, (), is_signed=True)

    return emit(counter)


def store_of_one(target: Any, value: Array) -> None:
    """Stores what that thread has of a value to shared memory."""
    text = f"{{ .reg .pred p; .reg .b32 t; {_IF_COUNTS} @p st.shared.b32 [$0], $1; }}"

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT))
    def emit(_, target, value):
        address = llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(target))
        operands = [address, value.registers[()]]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,r,~{memory}", has_side_effects=True)

    emit(target, value)


def _with_pointer(result: Any, text: str, constraints: str, semaphore: Any, *operands: Any) -> Any:
    """Inline assembly whose first operand is the address of a semaphore."""
    pointer = llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(semaphore))
    result = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(result, [pointer, *operands], text, constraints, has_side_effects=True)
