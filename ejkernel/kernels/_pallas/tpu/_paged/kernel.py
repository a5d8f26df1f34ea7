"""The kernel of attention over a cache: for each work item, an online softmax over its blocks of keys.

While a block is computed, the next one of this work item, or the first one of the next item, is copied to the other of
two buffers.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..flash_attention.launch import VMEM_BYTES
from ..flash_attention.tiles import MASKED
from .cache import LANES
from .copies import for_copies, wait
from .problem import Inputs, Outputs, Problem, State
from .softmax import accumulate, heads_at_once, write
from .work import blocks_of, count_of, item_at

BUFFERS = 2


def attend(items: jax.Array, x: Inputs, problem: Problem, name: str) -> Outputs:
    """o [tiles, g, m, e] and lse [tiles, g, m] float32; undefined for tokens that belong to no work item."""
    tiles, heads, rows, features = x.q.shape
    values = problem.values
    scalars = [items] if x.table is None else [items, x.table]
    of_tile = lambda i, items, *_: (item_at(items, i).tile, 0, 0, 0)
    of_lse = lambda i, items, *_: (item_at(items, i).tile, 0, 0)
    of_batch = lambda i, items, *_: (item_at(items, i).batch if x.sinks.shape[0] > 1 else 0, 0, 0, 0)
    in_smem, in_hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
    vmem = partial(pltpu.VMEM, dtype=jnp.float32)
    sorted_by_heads = [
        pltpu.VMEM((heads, len(cache.parts), cache.slots, cache.width), x.q.dtype)
        for cache in (problem.caches[0], problem.caches[-1])
    ]
    scales = tuple(vmem((heads, 1, problem.keys)) for _ in problem.scales)
    specs = Inputs(
        pl.BlockSpec((None, heads, rows, features), of_tile),
        tuple(in_hbm for _ in x.caches),
        None if x.sinks is None else pl.BlockSpec((None, heads, rows, LANES), of_batch),
        None if x.drafts is None else pl.BlockSpec((None, *x.drafts.shape[1:]), of_lse),
        None if x.k_scale is None else in_smem,
        None if x.v_scale is None else in_smem,
        tuple(in_hbm for _ in x.scales),
    )
    return pl.pallas_call(
        partial(_kernel, problem=problem, scalars=len(scalars)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count_of(items),),
            in_specs=[specs],
            out_specs=[
                Outputs(
                    pl.BlockSpec((None, heads, rows, values), of_tile),
                    pl.BlockSpec((None, heads, rows), of_lse),
                )
            ],
            scratch_shapes=[
                State(
                    vmem((heads, rows, LANES)),
                    vmem((heads, rows, LANES)),
                    vmem((heads, rows, values)),
                    scales,
                    *(sorted_by_heads if heads_at_once(heads, rows) < heads else ()),
                ),
                tuple(layout.buffers(BUFFERS) for layout in problem.copied),
                tuple(pltpu.SemaphoreType.DMA((BUFFERS,)) for _ in problem.copied),
            ],
        ),
        out_shape=[
            Outputs(
                jax.ShapeDtypeStruct((tiles, heads, rows, values), x.q.dtype),
                jax.ShapeDtypeStruct((tiles, heads, rows), jnp.float32),
            )
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        name=name,
    )(*scalars, x._replace(table=None))[0]


def _kernel(*refs, problem: Problem, scalars: int):
    (items, *tables), (x, out, state, buffers, semaphores) = refs[:scalars], refs[scalars:]
    copying = (*x.caches, *x.scales), buffers, semaphores, tables[0] if tables else None, problem
    over_blocks(items, copying, state, lambda *block: accumulate(x, buffers, state, *block, problem))
    item = item_at(items, pl.program_id(0))

    @pl.when(item.begin < item.end)
    def _():
        write(x, out, state, item, problem)


def over_blocks(items, copying: tuple, state: State, use: Callable):
    """The loop of a step of the grid: copies the blocks of its work item, and calls `use(item, block, slot)` for each.

    `copying` has the first arguments of `for_copies`, and the state is initialised.
    """
    problem = copying[-1]
    step, count = pl.program_id(0), count_of(items)
    item = item_at(items, step)
    blocks = blocks_of(item.first, item.stop, problem.keys)

    def start(number, block, slot):
        @pl.when(number < count)
        def _():
            for_copies(*copying, item_at(items, number), block, slot, lambda copy: copy.start())

    @pl.when(step == 0)
    def _():
        start(jnp.where(blocks > 0, 0, item.following), 0, 0)

    state.maximum[...] = jnp.full_like(state.maximum, MASKED)
    state.total[...] = jnp.zeros_like(state.total)
    state.weighted[...] = jnp.zeros_like(state.weighted)

    def of_block(block, carry):
        slot = lax.rem(item.before + block, BUFFERS)
        is_last = block == blocks - 1
        start(jnp.where(is_last, item.following, step), jnp.where(is_last, 0, block + 1), 1 - slot)
        wait(*copying, item, block, slot)
        use(item, block, slot)
        return carry

    lax.fori_loop(0, blocks, of_block, 0)
