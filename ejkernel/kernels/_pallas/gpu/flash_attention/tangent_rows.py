"""What a warpgroup of the tangent does with its rows: its part of the products, and the sums over the keys."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._launch import ROWS, WGMMA, accumulator, across, arrive, full, slot_of, sync
from . import plan as forward_plan
from .plan import Q_FREE, TURN
from .problem import Visits, after_first
from .tiles import View, logits, seen


class Tensors(NamedTuple):
    """The arrays, or their tiles in shared memory; None where a tangent is zero."""

    q: Any
    k: Any
    v: Any
    q_dot: Any
    k_dot: Any
    v_dot: Any


@dataclass(frozen=True)
class Plan(forward_plan.Plan):
    """As in the forward, with a block of threads for each tile."""

    @property
    def persistent(self) -> bool:
        return False

    @property
    def wide(self) -> bool:
        """A thread has no registers for the weights of two blocks beside its sums."""
        return self.problem.V > 128


@dataclass(frozen=True)
class Rows:
    """The rows of a warpgroup: their view, lse in powers of two, and what else their sums are computed from."""

    plan: Plan
    tiles: Tensors
    view: View
    visited: Visits
    lse: Array
    k_full: Any
    v_full: Any

    @property
    def moves(self) -> bool:
        """The weights have tangents."""
        return self.tiles.q_dot is not None or self.tiles.k_dot is not None

    @property
    def values_move(self) -> bool:
        return self.tiles.v_dot is not None

    def my_turn(self) -> None:
        sync(TURN + lax.axis_index("warpgroup"), 2)

    def your_turn(self) -> None:
        arrive(TURN + slot_of(lax.axis_index("warpgroup") + 1, self.plan.consumers), 2)

    def begin_keys(self, s, s_dot, slot: Array | int) -> None:
        tiles, number = self.tiles, lax.axis_index("warpgroup")
        plgpu.wgmma(s, tiles.q.at[number], tiles.k.at[slot].T)
        if tiles.q_dot is not None:
            plgpu.wgmma(s_dot, tiles.q_dot.at[number], tiles.k.at[slot].T)
        if tiles.k_dot is not None:
            plgpu.wgmma(s_dot, tiles.q.at[number], tiles.k_dot.at[slot].T)

    def begin_values(self, acc, p: Array, p_dot: Array, slot: Array) -> None:
        if self.moves:
            plgpu.wgmma(acc, p_dot, self.tiles.v.at[slot])
        if self.values_move:
            plgpu.wgmma(acc, p, self.tiles.v_dot.at[slot])

    def of_keys(self, slot: Array | int) -> tuple[Array, Array]:
        """s and ṡ, computed in turn."""

        def begin(s, s_dot):
            self.my_turn()
            self.begin_keys(s, s_dot, slot)
            self.your_turn()
            return s[...], s_dot[...]

        plgpu.barrier_wait(self.k_full.at[slot])
        products = pl.run_scoped(begin, *[accumulator(ROWS, self.plan.block_k)] * 2)
        arrive(self.plan.k_free + slot, self.plan.warpgroups)
        return products

    def with_values(self, acc: Array, p: Array, p_dot: Array, slot: Array) -> Array:
        """acc + p·ṡ·v + p·v̇."""
        plgpu.barrier_wait(self.v_full.at[slot])
        return pl.run_state(lambda acc: self.begin_values(acc, p, p_dot, slot))(plgpu.ACC.init(acc))

    def weigh(self, s: Array, s_dot: Array, moved: Array, step: Array | int, masked: bool):
        """p, p·ṡ, and the sum of the latter over the keys so far."""
        problem, ok = self.plan.problem, None
        s = logits(s, problem)
        if masked:
            first_key = (self.visited.end - 1 - step) * self.plan.block_k
            ok = seen(self.view, first_key, s.shape, problem.K % self.plan.block_k > 0, problem)
            s = s if ok is None else jnp.where(ok, s, -jnp.inf)
        p = jnp.exp2(s * problem.exponent - across(self.lse, s))
        p_dot = p * s_dot * problem.scale
        if problem.softcap is not None:
            p_dot = p_dot * (1 - s * s)
        if ok is not None and (problem.softcap is not None or self.view.reach is not None):
            p_dot = jnp.where(ok, p_dot, 0.0)  # s is infinite, or k or its tangent perhaps NaN
        return p, p_dot, moved + p_dot.sum(axis=1)


# ---- Of the rows Σ p·ṡ·v + p·v̇, Σ p·ṡ beside what is `moved` already, and the same with the p·ṡ rounded


def accumulate(rows: Rows, moved: Array) -> tuple[Array, Array, Array]:
    """The products with the keys of a block are under way at once with those with the values of the block before."""
    plan, problem = rows.plan, rows.plan.problem
    product, room = accumulator(ROWS, plan.block_k), full((ROWS, plan.block_k), 0.0, WGMMA)
    p, p_dot, first_moved = rows.weigh(*rows.of_keys(0), moved, 0, masked=True)
    p, p_dot = p.astype(problem.dtype), p_dot.astype(problem.dtype)
    carry = full((ROWS, problem.V), 0.0, WGMMA), p, p_dot, first_moved, moved + _sums(p_dot)

    def visit(step, carry, masked):
        acc, p, p_dot, moved, rounded_moved = carry
        slot, before = slot_of(step, plan.stages), slot_of(step - 1, plan.stages)
        plgpu.barrier_wait(rows.k_full.at[slot])

        def both(refs):
            acc, *results = refs

            def scoped(s, s_dot):
                rows.my_turn()
                rows.begin_keys(s, s_dot, slot)
                plgpu.barrier_wait(rows.v_full.at[before])
                rows.begin_values(acc, p, p_dot, before)
                rows.your_turn()
                wait = rows.moves + rows.values_move
                products = [plgpu.wgmma_accumulator_load(x, wait_n=wait) for x in (s, s_dot)]
                arrive(plan.k_free + slot, plan.warpgroups)
                for ref, value in zip(results, rows.weigh(*products, moved, step, masked), strict=True):
                    ref[...] = value
                plgpu.wgmma_wait(0)

            pl.run_scoped(scoped, product, product)

        acc, p, p_dot, moved = pl.run_state(both)((plgpu.ACC.init(acc), room, room, moved))
        arrive(plan.v_free + before, plan.warpgroups)
        p, p_dot = p.astype(problem.dtype), p_dot.astype(problem.dtype)
        return acc, p, p_dot, moved, rounded_moved + _sums(p_dot)

    acc, p, p_dot, moved, rounded_moved = after_first(rows.visited, visit, carry, problem)
    arrive(Q_FREE, plan.warpgroups)
    rows.my_turn()
    acc = rows.with_values(acc, p, p_dot, slot_of(rows.visited.end - rows.visited.begin - 1, plan.stages))
    rows.your_turn()
    return acc, moved, rounded_moved


def accumulate_wide(rows: Rows, moved: Array) -> tuple[Array, Array, Array]:
    """One block after the other."""
    plan, problem = rows.plan, rows.plan.problem

    def visit(step, carry, masked):
        acc, moved, rounded_moved = carry
        slot = slot_of(step, plan.stages)
        p, p_dot, moved = rows.weigh(*rows.of_keys(slot), moved, step, masked)
        p, p_dot = p.astype(problem.dtype), p_dot.astype(problem.dtype)
        acc = rows.with_values(acc, p, p_dot, slot)
        arrive(plan.v_free + slot, plan.warpgroups)
        return acc, moved, rounded_moved + _sums(p_dot)

    first = visit(jnp.int32(0), (full((ROWS, problem.V), 0.0, WGMMA), moved, moved), masked=True)
    sums = after_first(rows.visited, visit, first, problem)
    arrive(Q_FREE, plan.warpgroups)
    return sums


def _sums(rounded: Array) -> Array:
    return rounded.astype(jnp.float32).sum(axis=1)
