"""The warpgroups of the forward that hold queries, and the plan that all of them follow."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._launch import (
    FIRST_BARRIER,
    PER_ROW,
    ROWS,
    WGMMA,
    accumulator,
    arrive,
    block_number,
    full,
    slot_of,
    sync,
    times_rows,
)
from . import quantized
from .order import CACHED, Each, Walk
from .problem import Problem, Visits, after_first, visits
from .quantized import Scales, Units
from .reach import Reach
from .tiles import Statistics, View, logits, seen, weights

# The shared memory that a block of threads may use.
SHARED_BYTES = 227 * 1024
# Registers of a thread that computes and of one that loads, by how many warpgroups compute.
REGISTERS = {2: (232, 40), 3: (160, 32)}
# Named barriers: q may be overwritten; and from here on the turns of the consumers, the slots of k, and those of v.
Q_FREE = FIRST_BARRIER
TURN = Q_FREE + 1


@dataclass(frozen=True)
class Plan:
    """A problem, its blocks, in how many bits, and how the tiles are dealt out."""

    problem: Problem
    block_q: int
    block_k: int
    stages: int
    e4m3: bool = False

    @property
    def consumers(self) -> int:
        """Warpgroups that compute; one more loads."""
        return self.block_q // ROWS

    @property
    def warpgroups(self) -> int:
        return self.consumers + 1

    @property
    def q_tiles(self) -> int:
        return -(-self.problem.S // self.block_q)

    @property
    def persistent(self) -> bool:
        return self.shared_bytes(persistent=True) <= SHARED_BYTES

    @property
    def q_slots(self) -> int:
        return 2 if self.persistent else 1

    @property
    def partners(self) -> int:
        """Blocks of threads with neighbouring tiles of a head, which load each block of keys once for all of them.

        All must visit the same keys. It halves what is read from the L2 cache, and gains where that is most for what is
        computed: where two warpgroups share a block of keys.
        """
        together = self.persistent and not self.problem.cut and self.consumers == 2 and self.q_tiles % 2 == 0
        return 2 if together else 1

    @property
    def k_free(self) -> int:
        return TURN + self.consumers

    @property
    def v_free(self) -> int:
        return self.k_free + self.stages

    @property
    def lift(self) -> int:
        """The weights are multiplied by two to this."""
        return quantized.LIFT if self.e4m3 else 0

    @property
    def late(self) -> bool:
        """acc is scaled while the next q·kᵀ is computed; in e4m3 that takes half as long, and p·v would be late."""
        return not self.e4m3

    def shared_bytes(self, persistent: bool) -> int:
        """Bytes of shared memory: the tiles, and room for the rest."""
        D, V, size = self.problem.D, self.problem.V, self.problem.dtype.itemsize
        tile_size = 1 if self.e4m3 else size
        q, o = self.block_q * D * tile_size, self.block_q * V * size
        streamed = self.stages * self.block_k * (D + V) * tile_size
        return (2 * q + o if persistent else max(q, o)) + streamed + 2048

    @property
    def order(self) -> Walk | Each:
        problem, heads = self.problem, self.problem.H * self.problem.B
        if self.persistent:
            rising = problem.high is not None and problem.low is None
            return Walk(self.q_tiles, heads, rising)
        of_a_head = problem.K * (problem.D + problem.V) * problem.dtype.itemsize
        together = max(1, CACHED // of_a_head) * problem.group
        return Each(self.q_tiles, heads, together, rising=problem.high is not None)

    def tile(self, turn: Array, dealt: Any = None) -> tuple[Array, Array, Array]:
        """The first query, the head and the batch index of the tile that this block has in its `turn`."""
        place, head = self.order.tile(block_number(self.partners), turn, dealt)
        heads = jnp.int32(self.problem.H)
        return place * self.block_q, lax.rem(head, heads), lax.div(head, heads)

    def turns(self, dealt: Any) -> Array:
        """How many tiles this block has."""
        return self.order.turns(block_number(self.partners), dealt)

    def visits(self, first: Array, batch: Array, reach: Reach | None) -> Visits:
        if reach is not None:
            return reach.visits(lax.div(first, jnp.int32(self.block_q)), batch)
        return visits(first, self.block_q, self.problem.low, self.problem.high, self.problem.K, self.block_k)

    def units(self, scales: Scales | None, batch: Array, head: Array, first: Array) -> Units | None:
        """In e4m3, what is computed of the queries from `first` on is in these."""
        if scales is None:
            return None
        queries = scales.queries[batch, head, lax.div(first, jnp.int32(self.block_q))]
        return Units(queries, scales, (batch, lax.div(head, jnp.int32(self.problem.group))))

    def start(self, total: Array | float) -> Array:
        """The sum of a row that sums begin with; in e4m3 the threads that share a row have parts of it."""
        columns = quantized.COLUMNS
        return full((ROWS, columns), total / columns, WGMMA) if self.e4m3 else full((ROWS,), total, PER_ROW)

    def operand(self, p: Array) -> Array:
        """The weights as the product with v takes them."""
        return quantized.operand(p) if self.e4m3 else p.astype(self.problem.dtype)

    def values(self, tile: Any) -> Any:
        """A block of v as that product takes it: in e4m3 the keys are innermost."""
        return tile.T if self.e4m3 else tile


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
