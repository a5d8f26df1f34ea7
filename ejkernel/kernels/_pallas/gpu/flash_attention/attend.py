"""The warpgroups of the forward that hold queries."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._launch import (
    ROWS,
    WGMMA,
    accumulator,
    arrive,
    full,
    load_vector,
    slot_of,
    times_rows,
)
from .plan import Plan
from .problem import BlockRanges, Problem, after_first
from .quantized import Unit, Units
from .tiles import Statistics, View, logits, seen, updated, weights


class Shared(NamedTuple):
    """What the warpgroups of a block of threads share: tiles, and barriers.

    These say that tiles are full, and that q may be overwritten.
    """

    q: Any
    k: Any
    v: Any
    q_full: Any
    k_full: Any
    v_full: Any
    q_free: Any


class Tile(NamedTuple):
    """The rows that one warpgroup has in a turn.

    number: of the warpgroup. q: their queries in shared memory. view: where they stand, and whom they see. head: of the
    queries. visited: their blocks of keys. start: what the statistics begin with. units: in e4m3, what its numbers are
    in.
    """

    number: Array
    q: Any
    view: View
    head: Array
    visited: BlockRanges
    start: Statistics
    units: Units | None


class Begun(NamedTuple):
    """The step of the pipeline, of the block of keys before it the weights and the statistics, and q for products."""

    step: Array
    p: Array
    statistics: Statistics
    q: Array | None


def begin(shared: Shared, tile: Tile, plan: Plan) -> Begun:
    """The first block of the first tile."""

    def product(qk):
        plan.in_turn(tile.number, lambda: plgpu.wgmma(qk, tile.q if q is None else q, shared.k.at[0].T))
        return qk[...]

    plgpu.barrier_wait(shared.q_full.at[0])
    q = _in_registers(tile, plan)
    plgpu.barrier_wait(shared.k_full.at[0])
    products = pl.run_scoped(product, accumulator(ROWS, plan.block_k, plan.sums))
    p, statistics, _ = _weights(products, tile, tile.start, 0, _unit(tile, 0), plan)
    arrive(plan.k_free, plan.warpgroups)
    return Begun(jnp.int32(1), p, statistics, q)


def attend(
    shared: Shared, tile: Tile, following: Callable[[], Tile], turn: Array, turns: Array, begun: Begun, plan: Plan
) -> tuple[Array, Statistics, Begun]:
    """acc and the statistics of a tile that was begun; and the tile that follows, begun, if it is not the last turn."""
    step, p, before, q = begun

    def visit(i, carry, masked):
        acc, p, before = carry
        unit = _unit(tile, i)  # read while the products are computed
        acc, products = _products(shared, tile, q, step + i - 1, acc, p, plan)
        if masked:
            p, after, fade = _weights(products, tile, before, i, unit, plan)
            return times_rows(acc, fade), p, after
        s, exponent = _octaves(products, unit, plan.problem)
        return updated(acc, s, before, exponent, unit.lift, plan.bounds, plan.operand)

    acc = full((ROWS, plan.problem.V), 0.0, WGMMA)
    acc, p, statistics = after_first(tile.visited, visit, (acc, p, before), plan.problem)
    step += tile.visited.end - tile.visited.begin - 1

    def next_begun(acc, p, _):
        plgpu.barrier_arrive(shared.q_free.at[slot_of(turn, plan.q_slots)])
        plgpu.barrier_wait(shared.q_full.at[slot_of(turn + 1, plan.q_slots)])
        tile = following()
        unit, q = _unit(tile, 0), _in_registers(tile, plan)
        acc, products = _products(shared, tile, q, step, acc, p, plan)
        p, statistics, _ = _weights(products, tile, tile.start, 0, unit, plan)
        return acc, p, statistics, q

    def ended(acc, p, statistics):
        last = slot_of(step - 1, plan.stages)
        plgpu.barrier_wait(shared.v_full.at[last])

        begin = lambda acc: plgpu.wgmma(acc, p, plan.values(shared.v.at[last]))
        acc = pl.run_state(lambda acc: plan.in_turn(tile.number, lambda: begin(acc)))(plgpu.ACC.init(acc))
        return acc, p, statistics, q

    if plan.persistent:
        acc, p, of_next, q = lax.cond(turn + 1 < turns, next_begun, ended, acc, p, statistics)
    else:
        acc, p, of_next, q = ended(acc, p, statistics)
    return acc, statistics, Begun(step + 1, p, of_next, q)


def _in_registers(tile: Tile, plan: Plan) -> Array | None:
    """q, if it stays there while its tile is worked on."""
    return load_vector(tile.q, WGMMA) if plan.holds_q else None


def _products(
    shared: Shared, tile: Tile, q: Array | None, step: Array, acc: Array, p: Array, plan: Plan
) -> tuple[Array, Array]:
    """acc and the p·v of the step before; and q·kᵀ. Both have ended: the next weights take the registers of p."""
    slot, previous = slot_of(step, plan.stages), slot_of(step - 1, plan.stages)
    plgpu.barrier_wait(shared.k_full.at[slot])

    def both(refs):
        acc, products = refs

        def begin(qk):
            plgpu.wgmma(qk, tile.q if q is None else q, shared.k.at[slot].T)
            plgpu.barrier_wait(shared.v_full.at[previous])
            plgpu.wgmma(acc, p, plan.values(shared.v.at[previous]))

        def scoped(qk):
            plan.in_turn(tile.number, lambda: begin(qk))
            products[...] = plgpu.wgmma_accumulator_load(qk, wait_n=1)
            arrive(plan.k_free + slot, plan.warpgroups)
            plgpu.wgmma_wait(0)

        pl.run_scoped(scoped, accumulator(ROWS, plan.block_k, plan.sums))

    products = full((ROWS, plan.block_k), 0.0, WGMMA, plan.sums)
    acc, products = pl.run_state(both)((plgpu.ACC.init(acc), products))
    arrive(plan.v_free + previous, plan.warpgroups)
    return acc, products


def _weights(products: Array, tile: Tile, before: Statistics, i: Array | int, unit: Unit, plan: Plan):
    """Of a block that may have a mask, as an operand, with the statistics and the factor of earlier sums."""
    problem = plan.problem
    ok = seen(tile.view, _block(tile, i) * plan.block_k, products.shape, problem.K % plan.block_k > 0, problem)
    s, exponent = _octaves(products, unit, problem)
    p, statistics, fade = weights(s, before, ok, exponent, unit.lift, plan.bounds)
    return plan.operand(p), statistics, fade


def _octaves(products: Array, unit: Unit, problem: Problem) -> tuple[Array, Array | float]:
    """What becomes exponents of two by a factor, and that factor."""
    if problem.softcap is not None:
        return logits(products.astype(jnp.float32) * unit.factor, problem), problem.exponent
    return products, problem.exponent * unit.factor


def _block(tile: Tile, i: Array | int) -> Array:
    return tile.visited.end - 1 - i


def _unit(tile: Tile, i: Array | int) -> Unit:
    return Unit(1.0, 0) if tile.units is None else tile.units.of(_block(tile, i))
