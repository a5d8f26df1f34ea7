"""In which order thread blocks add to dq, where its bits are to be the same in every run.

A semaphore for every block of queries of a head counts the tiles of keys that have added to its dq. A tile waits until
the count is its rank among the tiles that do, adds, and counts itself when the addition is complete; then nothing
depends on when a thread block runs. Ranks are such that nobody waits in vain, and seldom at all: the next tile of keys
comes to a block of queries before this one does.

* With a band a tile of keys begins with the first queries that see it, which under a causal mask are later for later
  keys. So the last tile is the first to add, and its thread block is launched first.
* Without one all tiles see all queries. Tile j of a group of W begins with block s_j = ⌊j·M / W⌋ of M and comes to the
  first again after the last; block m is added to by the tiles from the last with s_j ≤ m downwards, then by those from
  the last of the group down to it. They wait for one another in a circle, so the W tiles have to run at once: a group
  has fewer tiles than a device has multiprocessors. It adds after the groups before it, which are launched earlier.
* Who sees whom by arrays (mask_info.py): the last tile first, too, and a table has the ranks.

That thread blocks start in the order of their numbers is what stream-K and FlashAttention-3 count on, too.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._launch import THREADS
from .mask_info import MaskInfo

SPLAT = plgpu.Layout.WG_SPLAT
# Tiles that wait for one another in a circle, at most: a program may run on a smaller device than it was lowered for,
# of which the smallest, an H20, has 78 multiprocessors.
MOST_IN_GROUP = 64


def table_of_ranks(mask_info: MaskInfo, blocks: int) -> Array:
    """[b, tiles, blocks] int32: how many later tiles of keys add to a block of queries, given the blocks of each."""
    block = jnp.arange(blocks, dtype=jnp.int32)
    begin, end = (mask_info.block_ranges[:, 0, :, n, None] for n in range(2))
    adds = ((begin <= block) & (block < end)).astype(jnp.int32)
    return jnp.cumsum(adds[:, ::-1], axis=1)[:, ::-1] - adds


def count_of(semaphore: Any) -> Array:
    """How many tiles have added to the block of queries that a semaphore, in device memory, is of.

    Nobody waits for the answer before it is looked at. All threads ask: of a warp they are one request.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, SPLAT))
    def emit(_, semaphore):
        from jax.experimental.mosaic.gpu import FragmentedArray
        from jaxlib.mlir import ir

        i32 = ir.IntegerType.get_signless(32)
        count = _assembly(i32, "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l,~{memory}", semaphore)
        return FragmentedArray.splat(count, (), is_signed=True)

    return emit(semaphore)


def await_rank(semaphore: Any, count: Array, rank: Array) -> None:
    """Waits until so many tiles have added; `count` is how many had when that was last asked.

    No thread reads dq, so none acquires it: TMA adds in the L2 cache, and is sent there after the count came from it.
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
        _assembly(None, text, "l,r,r,~{memory}", semaphore, count.registers[()], rank.registers[()])

    emit(semaphore, jnp.int32(count), jnp.int32(rank))


def count_up(semaphore: Any) -> None:
    """Counts this thread block at a semaphore, whose copies to device memory are complete."""
    text = f"""{{
        .reg .pred p; .reg .b32 t;
        mov.u32 t, %tid.x; and.b32 t, t, {THREADS - 1}; setp.eq.u32 p, t, 0;
        fence.proxy.async.global;
        @p red.release.gpu.global.add.s32 [$0], 1;
    }}"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(_, semaphore):
        _assembly(None, text, "l,~{memory}", semaphore)

    emit(semaphore)


def _assembly(result: Any, text: str, constraints: str, semaphore: Any, *operands: Any) -> Any:
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    pointer = llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(semaphore))
    result = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(result, [pointer, *operands], text, constraints, has_side_effects=True)
