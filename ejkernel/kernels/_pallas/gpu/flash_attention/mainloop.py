"""The consumer warpgroups of the forward: prologue, mainloop and epilogue of their work tiles."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._inline.registers import BITS, where_bits
from .._launch import ROWS, WGMMA, accumulator, arrive, either, full, load_vector, stage_of, times_rows
from .consumer_tile import ConsumerTile, Shared
from .pairs import biased
from .plan import PING_PONG, REGISTERS, Plan
from .problem import Problem, after_first
from .quantized import Unit
from .tiles import Statistics, loaded, logits, updated, visible, weights
from .work_tiles import TileQueue


class BlockInputs(NamedTuple):
    """What a softmax of a block of keys loads from device memory: the scales in e4m3, the words of mask bits, and the
    intervals or segment ids of a block that arrays mask.
    """

    unit: Unit
    bits: Sequence[Array]
    mask: tuple[Array, Array] | None = None


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
    if plan.consumers > 1:
        plgpu.set_max_registers(REGISTERS[plan.consumers][0], action="increase")
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

    def product(qk):
        plan.ping_pong(tile.number, lambda: _issue_qk(qk, shared, tile, q, 0))
        return qk[...]

    plgpu.barrier_wait(shared.q_full.at[0])
    q = _in_registers(tile, plan)
    plgpu.barrier_wait(shared.k_full.at[0])
    inputs = _block_inputs(tile, 0, plan, masked=True)
    products = pl.run_scoped(product, accumulator(ROWS, plan.block_k, plan.sums))
    products = _biased(products, shared, tile, 0, plan)
    p, statistics, _ = _weights(products, tile, tile.start, 0, inputs, plan)
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
        inputs = _block_inputs(tile, i, plan, masked)  # read while the products are computed
        values = partial(_await_values, shared, tile, lambda: _block(tile, i - 1))
        acc, products = _products(shared, tile, q, step + i - 1, acc, p, values, plan)
        products = _biased(products, shared, tile, step + i - 1, plan)
        if masked:
            p, after, alpha = _weights(products, tile, previous, i, inputs, plan)
            return times_rows(acc, alpha), p, after
        p_scale_log2, has_mask = inputs.unit.p_scale_log2, plan.bias or plan.mask
        if plan.tanh_by_polynomial:
            given = previous, plan.problem.exponent, p_scale_log2, plan.limits, plan.operand, has_mask
            return updated(acc, products, *given, capped=plan.problem)
        s, exponent = _log2_logits(products, inputs.unit, plan.problem)
        if plan.mask:
            s = where_bits(inputs.bits, s)
        return updated(acc, s, previous, exponent, p_scale_log2, plan.limits, plan.operand, has_mask)

    block_range = tile.block_range if tile.computed is None else tile.computed(step)
    acc = full((ROWS, plan.problem.V_tile), 0.0, WGMMA)
    acc, p, statistics = after_first(block_range, compute, (acc, p, previous), plan.problem)
    step += tile.block_range.end - tile.block_range.begin - 1
    values_of_last = partial(_await_values, shared, tile, lambda: tile.block(tile.block_range.begin))

    def start_next_tile(acc, p, _):
        plgpu.barrier_arrive(shared.q_empty.at[stage_of(work_tile, plan.q_stages)])
        plgpu.barrier_wait(shared.q_full.at[stage_of(work_tile + 1, plan.q_stages)])
        tile = next_tile()
        inputs, q = _block_inputs(tile, 0, plan, masked=True), _in_registers(tile, plan)
        acc, products = _products(shared, tile, q, step, acc, p, values_of_last, plan)
        products = _biased(products, shared, tile, step, plan)
        p, statistics, _ = _weights(products, tile, tile.start, 0, inputs, plan)
        return acc, p, statistics, q

    def finish_tile(acc, p, statistics):
        last = stage_of(step - 1, plan.stages)
        values_of_last(last)

        issue = lambda acc: plan.ping_pong(tile.number, lambda: _issue_pv(acc, shared, p, last, plan))
        acc = pl.run_state(issue)(plgpu.ACC.init(acc))
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
) -> tuple[Array, Array]:
    """acc + p·v of the previous block, and q·kᵀ of this one; waits for both, as the next p reuses the registers of p.

    `values(stage)` waits for the values of the previous block. Where it overwrites some of them with zeros, it is
    called before a product is issued.
    """
    stage, previous = stage_of(step, plan.stages), stage_of(step - 1, plan.stages)
    plgpu.barrier_wait(shared.k_full.at[stage])
    if tile.zero_hidden is not None:
        values(previous)

    def both(refs):
        acc, products = refs

        def issue(qk):
            _issue_qk(qk, shared, tile, q, stage)
            if tile.zero_hidden is None:
                values(previous)
            _issue_pv(acc, shared, p, previous, plan)

        def scoped(qk):
            plan.ping_pong(tile.number, lambda: issue(qk))
            products[...] = plgpu.wgmma_accumulator_load(qk, wait_n=len(shared.v.parts))
            arrive(plan.k_empty + stage, plan.warpgroups)
            plgpu.wgmma_wait(0)

        pl.run_scoped(scoped, accumulator(ROWS, plan.block_k, plan.sums))

    products = full((ROWS, plan.block_k), 0.0, WGMMA, plan.sums)
    acc, products = pl.run_state(both)((plgpu.ACC.init(acc), products))
    arrive(plan.v_empty + previous, plan.warpgroups)
    return acc, products


def _await_values(shared: Shared, tile: ConsumerTile, block: Callable[[], Array], stage: Array) -> None:
    """Waits for the values of a block in a stage, and zeroes those that no query sees, which may be NaN."""
    plgpu.barrier_wait(shared.v_full.at[stage])
    if tile.zero_hidden is not None:
        tile.zero_hidden(stage, block())


def _issue_qk(qk: Any, shared: Shared, tile: ConsumerTile, q: Array | None, stage: Array | int) -> None:
    for q_part, k_part in zip(tile.q if q is None else [q], shared.k.parts, strict=True):
        plgpu.wgmma(qk, q_part, k_part.at[stage].T)


def _issue_pv(acc: Any, shared: Shared, p: Array, stage: Array, plan: Plan) -> None:
    for acc_part, v_part in zip(shared.v.columns_of(acc), shared.v.parts, strict=True):
        plgpu.wgmma(acc_part, p, plan.values(v_part.at[stage]))


def _biased(products: Array, shared: Shared, tile: ConsumerTile, step: Array | int, plan: Plan) -> Array:
    """q·kᵀ with the scale that is an operand, and the bias of the block that was loaded in this step."""
    if tile.softmax_scale is not None:
        products = products * tile.softmax_scale  # which may be negative: row maxima are those of the logits
    if not plan.bias:
        return products
    stage = stage_of(step, plan.stages)
    plgpu.barrier_wait(shared.bias_full.at[stage])
    bias_tile = shared.bias.parts[0].at[stage, pl.ds(tile.number * ROWS, ROWS)]
    return biased(products, bias_tile, plan.problem.scale)


def _weights(qk: Array, tile: ConsumerTile, previous: Statistics, i: Array | int, inputs: BlockInputs, plan: Plan):
    """p of a block that may be masked, as an operand of wgmma; the row statistics; and alpha, which rescales acc."""
    problem, unit = plan.problem, inputs.unit
    # An empty list names a block past the last one, which is fully masked.
    uneven = plan.listed or problem.K % plan.block_k > 0
    ok = visible(tile.view, _block(tile, i) * plan.block_k, qk.shape, uneven, problem, inputs.mask)
    s, exponent = _log2_logits(qk, unit, problem)
    if plan.mask:
        s = where_bits(inputs.bits, s)
    p, statistics, alpha = weights(s, previous, ok, exponent, unit.p_scale_log2, plan.limits, plan.bias or plan.mask)
    return plan.operand(p), statistics, alpha


def _log2_logits(products: Array, unit: Unit, problem: Problem) -> tuple[Array, Array | float]:
    """Logits and the factor that makes them log₂ of weights."""
    if problem.softcap is not None:
        return logits(products.astype(jnp.float32) * unit.factor, problem), problem.exponent
    return products, problem.exponent * unit.factor


def _block(tile: ConsumerTile, i: Array | int) -> Array:
    return tile.block(tile.block_range.end - 1 - i)


def _block_inputs(tile: ConsumerTile, i: Array | int, plan: Plan, masked: bool) -> BlockInputs:
    unit = Unit(1.0, 0) if tile.units is None else tile.units.of(_block(tile, i))
    mask = None
    if masked and plan.problem.masked_by_arrays:
        mask = loaded(tile.view, _block(tile, i) * plan.block_k, (ROWS, plan.block_k))
    if tile.pairs is None:
        return BlockInputs(unit, (), mask)
    first = _block(tile, i) * (plan.block_k // BITS)
    bits = tile.pairs.words(tile.view.batch, tile.head, tile.view.row, first, plan.block_k)
    return BlockInputs(unit, bits, mask)
