"""The consumer warpgroups of the forward: prologue, mainloop and epilogue of their work tiles."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._inline.products import Term, awaited, product
from .._launch import ROWS, WGMMA, arrive, either, full, load_vector, stage_of, times_rows
from .block_softmax import block_inputs, block_of, block_weights, exponent_of, hidden_logits, with_bias
from .consumer_tile import ConsumerTile, Shared
from .plan import PING_PONG, Plan
from .problem import after_first
from .tiles import Statistics, updated
from .work_tiles import TileQueue


class Carry(NamedTuple):
    """What the mainloop carries from a block of keys to the next, and from a work tile to the next.

    step: of the pipeline. p: the weights of the previous block, whose product with v is still to be issued.
    statistics: the row maxima and sums with that block. q: in registers, if it stays there.
    """

    step: Array
    p: Array
    statistics: Statistics
    q: Array | None


def consume(
    shared: Shared,
    tile_of: Callable[[Array], ConsumerTile],
    store: Callable[[Array, ConsumerTile, Array, Statistics], None],
    number: Array,
    work_tiles: Array | TileQueue,
    plan: Plan,
) -> None:
    """A consumer warpgroup: computes its 64 rows of each work tile of the thread block.

    `work_tiles` is the number of these, or the queue from which they come; `tile_of(work_tile)` are the rows, and
    `store(work_tile, tile, acc, statistics)` is the epilogue.
    """
    if plan.registers:
        plgpu.set_max_registers(plan.registers[0], action="increase")
    for stage in range(2 * plan.stages):
        arrive(plan.k_empty + stage, plan.warpgroups)
    pl.when(number == plan.consumers - 1)(lambda: arrive(PING_PONG, 2))

    def compute_work_tile(work_tile, carried):
        tile = tile_of(work_tile)
        next_tile = lambda: tile_of(work_tile + 1)
        has_next = lambda: _has_tile(work_tiles, work_tile + 1)
        acc, statistics, more, carried = mainloop(shared, tile, next_tile, work_tile, has_next, carried, plan)
        store(work_tile, tile, acc, statistics)
        return more, carried

    if isinstance(work_tiles, TileQueue):
        work_tiles.await_tile(jnp.int32(0))
        first = jnp.int32(0), jnp.bool_(True), prologue(shared, tile_of(jnp.int32(0)), plan)
        one = lambda state: (state[0] + 1, *compute_work_tile(state[0], state[2]))
        lax.while_loop(lambda state: state[1], one, first)
        return
    one = lambda work_tile, carried: compute_work_tile(work_tile, carried)[1]
    lax.fori_loop(0, work_tiles, one, prologue(shared, tile_of(jnp.int32(0)), plan))


def _has_tile(work_tiles: Array | TileQueue, n: Array) -> Array:
    """Whether the thread block has an n-th work tile."""
    return work_tiles.await_tile(n) if isinstance(work_tiles, TileQueue) else n < work_tiles


def prologue(shared: Shared, tile: ConsumerTile, plan: Plan) -> Carry:
    """q·kᵀ and the softmax of the first block of keys of the first work tile."""
    plgpu.barrier_wait(shared.q_full.at[0])
    q = _in_registers(tile, plan)
    plgpu.barrier_wait(shared.k_full.at[0])
    inputs = block_inputs(tile, 0, plan, masked=True)
    (products,) = awaited(0, plan.ping_pong(tile.number, lambda: _issue_qk(shared, tile, q, 0, plan)))
    products = with_bias(products, shared, tile, 0, plan)
    p, statistics, _ = block_weights(products, tile, tile.start, 0, inputs, plan)
    arrive(plan.k_empty, plan.warpgroups)
    return Carry(jnp.int32(1), p, statistics, q)


def mainloop(
    shared: Shared,
    tile: ConsumerTile,
    next_tile: Callable[[], ConsumerTile],
    work_tile: Array,
    has_next: Callable[[], Array],
    carried: Carry,
    plan: Plan,
) -> tuple[Array, Statistics, Array, Carry]:
    """acc and the row statistics of a work tile; q·kᵀ and the softmax of its first block are carried in.

    Whether there is a next work tile, and its first block, is carried out: its q·kᵀ overlaps the last p·v.
    """
    step, p, previous, q = carried

    def compute(i, carry, masked):
        acc, p, previous = carry
        inputs = block_inputs(tile, i, plan, masked is True)  # read while the products are computed
        values = partial(_await_values, shared, tile, lambda: block_of(tile, i - 1))
        products_of = partial(_products, shared, tile, q, step + i - 1, acc, p, values, plan)
        if masked is True:
            acc, products = products_of()
            products = with_bias(products, shared, tile, step + i - 1, plan)
            p, after, alpha = block_weights(products, tile, previous, i, inputs, plan)
            return times_rows(acc, alpha), p, after

        def logits_of(products):
            return hidden_logits(with_bias(products, shared, tile, step + i - 1, plan), tile, i, inputs, masked, plan)

        acc, s = products_of(logits_of)
        has_mask = plan.bias or plan.mask or masked is not False
        limits = inputs.unit.p_scale_log2, plan.limits, plan.operand, has_mask
        capped = plan.problem if plan.tanh_by_polynomial else None
        return updated(acc, s, previous, exponent_of(inputs.unit, plan.problem), *limits, capped)

    block_range = tile.block_range if tile.computed is None else tile.computed(step)
    acc = full((ROWS, plan.problem.V_tile), 0.0, WGMMA)
    acc, p, statistics = after_first(block_range, compute, (acc, p, previous), plan.problem, one_loop=True)
    step += tile.block_range.end - tile.block_range.begin - 1
    values_of_last = partial(_await_values, shared, tile, lambda: tile.block(tile.block_range.begin))

    def start_next_tile(acc, p, _):
        plgpu.barrier_arrive(shared.q_empty.at[stage_of(work_tile, plan.q_stages)])
        plgpu.barrier_wait(shared.q_full.at[stage_of(work_tile + 1, plan.q_stages)])
        tile = next_tile()
        inputs, q = block_inputs(tile, 0, plan, masked=True), _in_registers(tile, plan)
        acc, products = _products(shared, tile, q, step, acc, p, values_of_last, plan)
        products = with_bias(products, shared, tile, step, plan)
        p, statistics, _ = block_weights(products, tile, tile.start, 0, inputs, plan)
        return acc, p, statistics, q

    def finish_tile(acc, p, statistics):
        last = stage_of(step - 1, plan.stages)
        values_of_last(last)

        (acc,) = awaited(0, plan.ping_pong(tile.number, lambda: _issue_pv(acc, shared, p, last, plan)))
        return acc, p, statistics, q

    if plan.persistent:
        more, unchanged = has_next(), lambda *carried: (*carried, q)
        acc, p, after, q = either(more, start_next_tile, finish_tile, acc, p, statistics, unused=unchanged)
    else:
        more, (acc, p, after, q) = jnp.bool_(False), finish_tile(acc, p, statistics)
    return acc, statistics, more, Carry(step + 1, p, after, q)


def _in_registers(tile: ConsumerTile, plan: Plan) -> Array | None:
    """q, if it stays there for the whole work tile."""
    return load_vector(tile.q[0], WGMMA) if plan.q_in_registers else None


def _products(
    shared: Shared,
    tile: ConsumerTile,
    q: Array | None,
    step: Array,
    acc: Array,
    p: Array,
    values: Callable[[Array], None],
    plan: Plan,
    before_wait: Callable[[Array], Array] = lambda products: products,
) -> tuple[Array, Array]:
    """acc + p·v of the previous block, and q·kᵀ of this one; waits for both, as the next p reuses the registers of p.

    `before_wait` is what is computed of q·kᵀ before the wait for p·v: ptxas begins the softmax before that wait, but
    not if a branch is between them. `values(stage)` waits for the values of the previous block. Where it overwrites
    some of them with zeros, it is called before a product is issued.
    """
    stage, previous = stage_of(step, plan.stages), stage_of(step - 1, plan.stages)
    plgpu.barrier_wait(shared.k_full.at[stage])
    if tile.zero_hidden is not None:
        values(previous)

    def issue():
        qk = _issue_qk(shared, tile, q, stage, plan)
        if tile.zero_hidden is None:
            values(previous)
        return qk, _issue_pv(acc, shared, p, previous, plan)

    qk, pv = plan.ping_pong(tile.number, issue)
    (products,) = awaited(1, qk)
    arrive(plan.k_empty + stage, plan.warpgroups)
    products = before_wait(products)
    (acc,) = awaited(0, pv)
    arrive(plan.v_empty + previous, plan.warpgroups)
    return acc, products


def _await_values(shared: Shared, tile: ConsumerTile, block: Callable[[], Array], stage: Array) -> None:
    """Waits for the values of a block in a stage, and zeroes those that no query sees, which may be NaN."""
    plgpu.barrier_wait(shared.v_full.at[stage])
    if tile.zero_hidden is not None:
        tile.zero_hidden(stage, block())


def _issue_qk(shared: Shared, tile: ConsumerTile, q: Array | None, stage: Array | int, plan: Plan) -> Array:
    """Begins q·kᵀ."""
    parts = zip(tile.q if q is None else [q], shared.k.parts, strict=True)
    terms = [Term(q_part, k_part.at[stage], transposed_b=True, stationary_a=True) for q_part, k_part in parts]
    return product(jnp.zeros((ROWS, plan.block_k), plan.sums), terms)


def _issue_pv(acc: Array, shared: Shared, p: Array, stage: Array, plan: Plan) -> Array:
    """Begins acc + p·v; in e4m3 the keys of v are innermost."""
    parts = zip(shared.v.parts, shared.v.columns_of_sums, strict=True)
    terms = [Term(p, v_part.at[stage], transposed_b=plan.e4m3, columns=columns) for v_part, columns in parts]
    return product(acc, terms)
