"""The producer warpgroup of the backward: it loads tiles for the consumers, and adds their ds·k to dq in device memory.

The additions of thread blocks come in any order, unless `deterministic` asks for one: then a semaphore for each block
of queries says which tile of keys adds next (dq_semaphore.py).
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._inline.barriers import await_rank, count_of, count_up
from .._inline.products import Term, awaited, product
from .._inline.rows import store_tile
from .._launch import ROWS, arrive, stage_of, sync
from .backward_plan import DONE, Q_EMPTY, WARPGROUPS, Plan, Shared
from .hidden_rows import load_visible
from .key_tile import KeyTile, key_tile
from .mask_info import MaskInfo
from .pairs import Pairs

# Registers of a thread: with those of the two consumers 504 in all.
REGISTERS = 72


class DqSums(NamedTuple):
    """dq in device memory, float32, and its semaphores and table of ranks (dq_semaphore.py), or None.

    ds: where it is kept in device memory, [b, h, K, S], for the gradient of a bias; or None.
    """

    dq: Any
    semaphore: Any
    ranks: Any
    ds: Any = None


def produce(
    stationary: tuple, streamed: tuple, tiles: Shared, mask_info: MaskInfo | None, pairs: Pairs | None, sums: DqSums,
    landed: Sequence[Any], plan: Plan,
) -> None:  # fmt: skip
    """Loads the `stationary` k and v, and for each step what is `streamed`: q, do, start and delta; then adds to dq.

    `landed`: barriers of k and q, and of v and do, for tiles with fully masked rows (hidden_rows.py).
    """
    plgpu.set_max_registers(REGISTERS, action="decrease")
    keys, hidden, of_tile = key_tile(plan, mask_info), None, None
    if plan.zeroes_hidden:
        hidden = mask_info.hidden_rows.of_block(keys.batch, keys.number)
        of_tile = mask_info.hidden_columns.of_tile(keys.batch, keys.number)
    for key_block in range(plan.key_blocks):
        rows = pl.ds(keys.first + key_block * ROWS, ROWS)
        widths = plan.problem.D, plan.problem.V
        for array, of_array, width, barrier in zip(stationary, (tiles.k, tiles.v), widths, landed, strict=True):
            source = lambda of_part, array=array, rows=rows: array.at[keys.batch, rows, keys.kv_head, of_part]
            of_rows = mask_info and mask_info.hidden_rows, keys.batch, rows.start, barrier
            load_visible(hidden, *of_rows, of_array, key_block, source, width, tiles.kv_full)
    load = partial(_load, streamed, pairs, tiles, keys, of_tile, landed)
    steps = keys.steps()
    lax.fori_loop(0, jnp.minimum(steps, plan.stages), lambda step, _: load(step), None)
    plgpu.barrier_wait(tiles.kv_full)
    semaphore_of = partial(_semaphore_of, sums.semaphore, keys)

    def compute(step, _):
        _add_in_order(step, tiles, sums, semaphore_of, keys)

        @pl.when(step + plan.stages < steps)
        def _():
            sync(Q_EMPTY + stage_of(step, plan.stages), WARPGROUPS)
            load(step + plan.stages)

    lax.fori_loop(0, steps, compute, None)
    arrive(DONE, WARPGROUPS)
    if plan.deterministic and plan.signals_late:
        pl.when(steps > 0)(lambda: _complete(steps - 1, semaphore_of))
    else:
        plgpu.wait_smem_to_gmem(0)


def _load(
    arrays: tuple, pairs: Pairs | None, tiles: Shared, keys: KeyTile, hides: Array | None, landed: Sequence[Any],
    step: Array,
) -> None:  # fmt: skip
    """Starts the copies of q, do, their row vectors and the bias for the queries of a step."""
    (q, do, start, delta), plan, problem = arrays, keys.plan, keys.plan.problem
    q_full, do_full = (barrier.at[stage_of(step, plan.stages)] for barrier in (tiles.q_full, tiles.do_full))
    block, head = keys.place(step)
    batch, rows, stage = keys.batch, pl.ds(block * plan.block_q, plan.block_q), stage_of(step, plan.stages)
    masked = keys.mask_info and keys.mask_info.hidden_columns
    hidden = masked and masked.of_streamed_block(hides, batch, block)
    load_tile = partial(load_visible, hidden, masked, batch, rows.start)
    load_tile(landed[0], tiles.q, stage, lambda of_part: q.at[batch, rows, head, of_part], problem.D, q_full)
    plgpu.copy_gmem_to_smem(start.at[batch, head, rows], tiles.start.at[stage], q_full)
    for key_block in range(plan.key_blocks if plan.bias else 0):
        tile = pairs.tile_of_bias(batch, head, rows, pl.ds(keys.first + key_block * ROWS, ROWS))
        plgpu.copy_gmem_to_smem(tile, tiles.bias.copies[0].at[stage, key_block], q_full)
    load_tile(landed[1], tiles.do, stage, lambda of_part: do.at[batch, rows, head, of_part], problem.V, do_full)
    plgpu.copy_gmem_to_smem(delta.at[batch, head, rows], tiles.delta.at[stage], do_full)


def _add_in_order(step: Array, tiles: Shared, sums: DqSums, semaphore_of: Callable, keys: KeyTile) -> None:
    """Adds the ds·k of a step to dq: when its rank is due if the sum is deterministic, else at once."""
    add, plan = partial(_accumulate_dq, step, tiles, sums, keys), keys.plan
    if not plan.deterministic:
        return add()
    count = count_of(semaphore_of(step))
    rank = lambda: keys.rank(sums.ranks, keys.place(step)[0])
    due = lambda: await_rank(semaphore_of(step), count, rank())
    late = (lambda: pl.when(step > 0)(lambda: _complete(step - 1, semaphore_of))) if plan.signals_late else None
    add(due, late)
    if not plan.signals_late:
        _complete(step, semaphore_of)


def _complete(step: Array, semaphore_of: Callable) -> None:
    """Waits until the addition of a step is in device memory, and counts it at its semaphore."""
    plgpu.wait_smem_to_gmem(0)
    count_up(semaphore_of(step))


def _semaphore_of(semaphore: Any, keys: KeyTile, step: Array) -> Any:
    """The semaphore of the block of queries of a step."""
    block, head = keys.place(step)
    return semaphore.at[keys.batch, head, block]


def _keep_ds(stage: Array, block: Array, head: Array, tiles: Shared, ds: Any, keys: KeyTile) -> None:
    """Starts the copies of ds of a step to device memory, transposed as it is."""
    queries = pl.ds(block * keys.plan.block_q, keys.plan.block_q)
    for key_block in range(keys.plan.key_blocks):
        rows = pl.ds(keys.first + key_block * ROWS, ROWS)
        plgpu.copy_smem_to_gmem(tiles.ds.at[stage, key_block], ds.at[keys.batch, head, rows, queries])


def _accumulate_dq(
    step: Array, tiles: Shared, sums: DqSums, keys: KeyTile,
    before_addition: Callable[[], None] = lambda: None, under_first_product: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Adds ds·k of a step to dq, computed in squares of 64 × 64 because the producer has few registers."""
    plan, stage = keys.plan, stage_of(step, keys.plan.ds_stages)
    block, head = keys.place(step)
    sync(plan.ds_full + stage, plan.key_blocks + 1)
    if plan.dbias:
        _keep_ds(stage, block, head, tiles, sums.ds, keys)
    for chunk in plan.dq_chunks:
        (dq_tile,) = (tile for (tile,) in tiles.dq if tile.shape[1] == chunk.stop - chunk.start)
        squares = itertools.product(range(0, plan.block_q, ROWS), _columns_of_k(chunk, plan))
        for n, (row, (part, columns, features)) in enumerate(squares):
            rows, k_tile = slice(row, row + ROWS), tiles.k.parts[part]
            of_keys = [
                Term(tiles.ds.at[stage, key_block, :, rows], k_tile.at[key_block, :, columns], transposed_a=True)
                for key_block in range(plan.key_blocks)
            ]
            square = product(jnp.zeros((ROWS, columns.stop - columns.start)), of_keys)
            begins = n == 0 and chunk == plan.dq_chunks[0] and under_first_product is not None
            if begins:
                under_first_product()
            (square,) = awaited(0, square)
            if n == 0 and not begins:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            width = features.stop - features.start
            of_square = dq_tile.at[rows, features.start - chunk.start : features.stop - chunk.start]
            store_tile(of_square, square[:, :width])
        if chunk == plan.dq_chunks[-1]:
            if plan.dbias:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(tiles.ds_empty.at[stage])
        if chunk == plan.dq_chunks[0]:
            before_addition()
        plgpu.commit_smem()
        at = keys.batch, pl.ds(block * plan.block_q, plan.block_q), head, chunk
        plgpu.copy_smem_to_gmem(dq_tile, sums.dq.at[at], reduction_op="add")


def _columns_of_k(chunk: slice, plan: Plan) -> list[tuple[int, slice, slice]]:
    """Splits the features of a chunk into at most 64 at a time: (part of k, columns of the part, features)."""
    found = []
    for n, part in enumerate(plan.D_parts):
        begin, end = max(part.start, chunk.start), min(part.stop, chunk.stop)
        for start in range(begin, end, ROWS):
            stop = min(start + ROWS, part.stop)
            found.append((n, slice(start - part.start, stop - part.start), slice(start, min(stop, end))))
    return found
