"""The warpgroups of the forward that hold queries."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._launch import (
    PER_ROW,
    ROWS,
    WGMMA,
    accumulator,
    arrive,
    full,
    slot_of,
    sync,
    times_rows,
)
from . import quantized
from .plan import TURN, Plan
from .problem import Visits, after_first
from .quantized import Units
from .tiles import Statistics, View, logits, seen, weights


class Shared(NamedTuple):
    """What the warpgroups of a block of threads share: tiles, and barriers.

    These say that tiles are full; that q may be overwritten; and that all partners may overwrite a slot of k or v.
    """

    q: Any
    k: Any
    v: Any
    q_full: Any
    k_full: Any
    v_full: Any
    q_free: Any
    slots_free: Any


class Tile(NamedTuple):
    """The rows that one warpgroup has in a turn.

    q: their queries in shared memory. view: where they stand, and whom they see. head: of the queries. visited: their
    blocks of keys. start: what the statistics begin with. units: in e4m3, what its numbers are in.
    """

    q: Any
    view: View
    head: Array
    visited: Visits
    start: Statistics
    units: Units | None


class Begun(NamedTuple):
    """The step of the pipeline, and of the block of keys before it the weights and the statistics."""

    step: Array
    p: Array
    statistics: Statistics


def begin(shared: Shared, tile: Tile, plan: Plan) -> Begun:
    """The first block of the first tile."""

    def product(qk):
        _my_turn()
        plgpu.wgmma(qk, tile.q, shared.k.at[0].T)
        _your_turn(plan)
        return qk[...]

    plgpu.barrier_wait(shared.q_full.at[0])
    plgpu.barrier_wait(shared.k_full.at[0])
    products = pl.run_scoped(product, accumulator(ROWS, plan.block_k))
    p, statistics, _ = _softmax(products, tile, tile.start, 0, True, _unit(tile, 0), plan)
    arrive(plan.k_free, plan.warpgroups)
    return Begun(jnp.int32(1), plan.operand(p), statistics)


def attend(
    shared: Shared, tile: Tile, following: Callable[[], Tile], turn: Array, turns: Array, begun: Begun, plan: Plan
) -> tuple[Array, Statistics, Begun]:
    """acc and the statistics of a tile that was begun; and the tile that follows, begun, if it is not the last turn."""
    step, p, before = begun

    def visit(i, carry, masked):
        acc, fade, p, before = carry
        acc, weight, after, fade = _overlapped(shared, tile, i, step + i - 1, acc, fade, p, before, masked, plan)
        p = plan.operand(weight)
        return acc if plan.late else times_rows(acc, fade), fade, p, after

    acc, fade = full((ROWS, plan.problem.V), 0.0, WGMMA), full((ROWS,), 1.0, PER_ROW)
    acc, fade, p, statistics = after_first(tile.visited, visit, (acc, fade, p, before), plan.problem)
    step += tile.visited.end - tile.visited.begin - 1

    def next_begun(acc, fade, p, _):
        plgpu.barrier_arrive(shared.q_free.at[slot_of(turn, plan.q_slots)])
        plgpu.barrier_wait(shared.q_full.at[slot_of(turn + 1, plan.q_slots)])
        tile = following()
        acc, weight, statistics, _ = _overlapped(shared, tile, 0, step, acc, fade, p, tile.start, True, plan)
        return acc, plan.operand(weight), statistics

    def ended(acc, fade, p, statistics):
        last = slot_of(step - 1, plan.stages)
        plgpu.barrier_wait(shared.v_full.at[last])

        def product(acc):
            _my_turn()
            plgpu.wgmma(acc, p, plan.values(shared.v.at[last]))
            _your_turn(plan)

        return pl.run_state(product)(plgpu.ACC.init(times_rows(acc, fade) if plan.late else acc)), p, statistics

    if plan.persistent:
        acc, p, of_next = lax.cond(turn + 1 < turns, next_begun, ended, acc, fade, p, statistics)
    else:
        acc, p, of_next = ended(acc, fade, p, statistics)
    return acc, statistics, Begun(step + 1, p, of_next)


def _overlapped(
    shared: Shared, tile: Tile, i: Array | int, step: Array, acc: Array, fade: Array, p: Array, before: Statistics,
    masked: bool, plan: Plan,
):  # fmt: skip
    """Adds the p·v of the step before to acc and, meanwhile, finds the weights of block i of a tile.

    Where acc is scaled late, it is here.
    """
    slot, previous, unit = slot_of(step, plan.stages), slot_of(step - 1, plan.stages), _unit(tile, i)
    plgpu.barrier_wait(shared.k_full.at[slot])

    def both(refs):
        acc, *results = refs

        def scoped(qk):
            _my_turn()
            plgpu.wgmma(qk, tile.q, shared.k.at[slot].T)
            if plan.late:
                acc[...] = times_rows(plgpu.wgmma_accumulator_load(acc, wait_n=None), fade)
            plgpu.barrier_wait(shared.v_full.at[previous])
            plgpu.wgmma(acc, p, plan.values(shared.v.at[previous]))
            _your_turn(plan)
            products = plgpu.wgmma_accumulator_load(qk, wait_n=1)
            arrive(plan.k_free + slot, plan.warpgroups)
            found = _softmax(products, tile, before, i, masked, unit, plan)
            for ref, value in zip(results, jax.tree.leaves(found), strict=True):
                ref[...] = value
            plgpu.wgmma_wait(0)

        pl.run_scoped(scoped, accumulator(ROWS, plan.block_k))

    room = full((ROWS, plan.block_k), 0.0, WGMMA)
    acc, weight, *found, fade = pl.run_state(both)((plgpu.ACC.init(acc), room, *before, before.maximum))
    arrive(plan.v_free + previous, plan.warpgroups)
    return acc, weight, Statistics(*found), fade


def _softmax(products: Array, tile: Tile, before: Statistics, i: Array | int, masked: bool, unit: Any, plan: Plan):
    problem, ok = plan.problem, None
    if masked:
        first_key = _block(tile, i) * plan.block_k
        ok = seen(tile.view, first_key, products.shape, problem.K % plan.block_k > 0, problem)
    if plan.e4m3:
        return quantized.weights(products, unit, before, ok, problem)
    return weights(logits(products, problem), before, ok, problem.exponent)


def _block(tile: Tile, i: Array | int) -> Array:
    return tile.visited.end - 1 - i


def _unit(tile: Tile, i: Array | int) -> Any:
    """What the products and the weights of a block of keys are in."""
    return None if tile.units is None else tile.units.of(_block(tile, i))


def _my_turn() -> None:
    sync(TURN + lax.axis_index("warpgroup"), 2)


def _your_turn(plan: Plan) -> None:
    arrive(TURN + slot_of(lax.axis_index("warpgroup") + 1, plan.consumers), 2)
