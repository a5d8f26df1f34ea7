"""The tangent kernel: those of o and lse from those of q, k and v, in five products a tile and one pass over the keys.

With the weights p = exp(s − lse) computed again, and ṡ = scale·(q̇·kᵀ + q·k̇ᵀ) ∘ (1 − (s/softcap)²),

    lse_dot_i = Σ_j p_ij·ṡ_ij,    o_dot_i = Σ_j p_ij·ṡ_ij·(v_j − o_i) + p_ij·v̇_j

where o is taken off at the end, by the sum of what the p·ṡ of the row were rounded to for their product with v: so a
tangent is exact where all the weight is on one key.

Tiles and warpgroups are those of the forward: the products with the keys of one block are under way at once with those
with the values of the block before. Products with a tangent that is zero are left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from . import forward
from .forward import Q_FREE, REGISTERS, TURN
from .launch import (
    PER_ROW,
    ROWS,
    WGMMA,
    accumulator,
    across,
    arrive,
    full,
    launch,
    load_vector,
    shared,
    slot_of,
    sync,
    whole_eights,
)
from .problem import LOG2_E, Visits, after_first, problem_of
from .reach import Reach, reach_of, without_unseen
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
class Plan(forward.Plan):
    """As in the forward, with a block of threads for each tile."""

    @property
    def persistent(self) -> bool:
        return False


def flash_attention_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: FlashAttentionSpec,
    config: KernelConfig,
) -> Outputs:
    problem = problem_of(primals, spec)
    plan = Plan(problem, config.block_q, config.block_k, config.num_stages)
    eights = lambda x: None if x is None else whole_eights(x)
    v, v_dot = without_unseen(primals, spec, problem, primals.v, tangents.v)
    tensors = Tensors(*map(eights, (primals.q, primals.k, v, tangents.q, tangents.k, v_dot)))
    # Where nothing is seen the weights are exp(−∞).
    lse = jnp.where(outputs.lse == -jnp.inf, jnp.inf, outputs.lse * LOG2_E)
    rows = plan.q_tiles * plan.block_q
    lse = jnp.pad(lse, [(0, 0), (0, 0), (0, rows - problem.S)], constant_values=jnp.inf)
    dtype, stages = problem.dtype, plan.stages
    held = lambda width: shared((plan.consumers, ROWS, width), dtype)
    keys = lambda x: None if x is None else shared((stages, plan.block_k, problem.D), dtype)
    swizzle = min(128, plan.block_k * dtype.itemsize)
    values = lambda x: None if x is None else shared((stages, plan.block_k, problem.V), dtype, swizzle)
    o_dot, lse_dot = launch(
        partial(_kernel, plan=plan),
        "flash_attention_tangent",
        (
            tensors,
            whole_eights(outputs.o),
            lse,
            _sinks_moved(primals, lse, tangents),
            reach_of(primals, spec, problem, plan.block_q, plan.block_k),
        ),
        out_type=(
            jax.ShapeDtypeStruct((*tensors.q.shape[:3], problem.V), dtype),
            jax.ShapeDtypeStruct((problem.B, problem.H, rows), jnp.float32),
        ),
        blocks=plan.tiles,
        warpgroups=plan.warpgroups,
        scratch=dict(
            q_and_o=plgpu.RefUnion(held(problem.D), held(problem.V)),
            q_dot_tile=None if tensors.q_dot is None else held(problem.D),
            keys=(keys(tensors.k), keys(tensors.k_dot)),
            values=(values(tensors.v), values(tensors.v_dot)),
            lse_tile=plgpu.SMEM((plan.consumers, ROWS), jnp.float32),
            q_full=plgpu.Barrier(num_arrivals=plan.consumers * (2 + (tensors.q_dot is not None))),
            o_full=plgpu.Barrier(num_arrivals=plan.consumers),
            k_full=plgpu.Barrier(num_barriers=stages, num_arrivals=1 + (tensors.k_dot is not None)),
            v_full=plgpu.Barrier(num_barriers=stages, num_arrivals=1 + (tensors.v_dot is not None)),
        ),
    )
    return Outputs(o_dot[:, : problem.S], lse_dot[:, :, : problem.S])


def _sinks_moved(primals: Operands, lse: Array, tangents: Operands) -> Array | None:
    """What sinks add to Σ p·ṡ of the rows, Σ_n exp(sink_n − lse)·sink_dot_n: [b, h, rows]; `lse` is one of twos."""
    if primals.sinks is None or tangents.sinks is None:
        return None
    p = jnp.exp2(primals.sinks[:, :, :, None] * LOG2_E - lse[:, :, None])
    return (p * tangents.sinks[:, :, :, None]).sum(2)


def _kernel(
    tensors: Tensors, o, lse, sinks_moved, reach: Reach | None, o_dot, lse_dot, *, plan: Plan,
    q_and_o, q_dot_tile, keys, values, lse_tile, q_full, o_full, k_full, v_full,
):  # fmt: skip
    (q_tile, o_tiles), number = q_and_o, lax.axis_index("warpgroup")
    tiles = Tensors(q_tile, keys[0], values[0], q_dot_tile, keys[1], values[1])
    first, head, batch = plan.tile(jnp.int32(0))
    visited = plan.visits(first, batch, reach)
    rows_of = lambda consumer: pl.ds(first + consumer * ROWS, ROWS)

    def consume():
        plgpu.set_max_registers(REGISTERS[plan.consumers][0], action="increase")
        for slot in range(2 * plan.stages):
            arrive(plan.k_free + slot, plan.warpgroups)
        pl.when(number == plan.consumers - 1)(lambda: arrive(TURN, 2))
        plgpu.barrier_wait(q_full)
        lse_of_rows, moved = load_vector(lse_tile.at[number], PER_ROW), full((ROWS,), 0.0, PER_ROW)
        if sinks_moved is not None:
            moved = load_vector(sinks_moved.at[batch, head, rows_of(number)], PER_ROW, optimized=False)
        weigh = partial(_weigh, lse_of_rows, View(batch, first + number * ROWS, reach), plan)
        acc, moved, rounded_moved = _accumulate(tiles, weigh, moved, visited, k_full, v_full, plan)
        plgpu.barrier_wait(o_full)
        acc -= across(rounded_moved, acc) * o_tiles[number].astype(jnp.float32)
        o_tiles[number] = acc.astype(plan.problem.dtype)
        lse_tile[number] = moved
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_tiles.at[number], o_dot.at[batch, rows_of(number), head])
        plgpu.copy_smem_to_gmem(lse_tile.at[number], lse_dot.at[batch, head, rows_of(number)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def load():
        plgpu.set_max_registers(REGISTERS[plan.consumers][1], action="decrease")
        for consumer in range(plan.consumers):
            at = batch, rows_of(consumer), head
            plgpu.copy_gmem_to_smem(tensors.q.at[at], tiles.q.at[consumer], q_full)
            if tensors.q_dot is not None:
                plgpu.copy_gmem_to_smem(tensors.q_dot.at[at], tiles.q_dot.at[consumer], q_full)
            plgpu.copy_gmem_to_smem(lse.at[batch, head, rows_of(consumer)], lse_tile.at[consumer], q_full)

        def block(step, _):
            slot = slot_of(step, plan.stages)
            keys = pl.ds((visited.end - 1 - step) * plan.block_k, plan.block_k)
            at = batch, keys, lax.div(head, jnp.int32(plan.problem.group))
            for names, free, barrier in (("k", plan.k_free, k_full), ("v", plan.v_free, v_full)):
                sync(free + slot, plan.warpgroups)
                for name in (names, f"{names}_dot"):
                    if getattr(tensors, name) is not None:
                        tile = getattr(tiles, name).at[slot]
                        plgpu.copy_gmem_to_smem(getattr(tensors, name).at[at], tile, barrier.at[slot])

        lax.fori_loop(0, visited.end - visited.begin, block, None)
        sync(Q_FREE, plan.warpgroups)
        for consumer in range(plan.consumers):
            plgpu.copy_gmem_to_smem(o.at[batch, rows_of(consumer), head], o_tiles.at[consumer], o_full)

    lax.cond(number < plan.consumers, consume, load)


def _accumulate(tiles: Tensors, weigh: Callable, moved: Array, visited: Visits, k_full, v_full, plan: Plan):
    """Of the rows of this warpgroup Σ p·ṡ·v + p·v̇, Σ p·ṡ beside what is `moved` already, and that of rounded p·ṡ."""
    problem, number, product = plan.problem, lax.axis_index("warpgroup"), accumulator(ROWS, plan.block_k)
    my_turn, your_turn = partial(sync, TURN + number, 2), partial(arrive, TURN + slot_of(number + 1, plan.consumers), 2)
    moves, values_move = tiles.q_dot is not None or tiles.k_dot is not None, tiles.v_dot is not None
    room, rounded = full((ROWS, plan.block_k), 0.0, WGMMA), lambda x: x.astype(problem.dtype)

    def begin_keys(s, s_dot, slot):
        plgpu.wgmma(s, tiles.q.at[number], tiles.k.at[slot].T)
        if tiles.q_dot is not None:
            plgpu.wgmma(s_dot, tiles.q_dot.at[number], tiles.k.at[slot].T)
        if tiles.k_dot is not None:
            plgpu.wgmma(s_dot, tiles.q.at[number], tiles.k_dot.at[slot].T)

    def begin_values(acc, p, p_dot, slot):
        if moves:
            plgpu.wgmma(acc, p_dot, tiles.v.at[slot])
        if values_move:
            plgpu.wgmma(acc, p, tiles.v_dot.at[slot])

    def begin(s, s_dot):
        my_turn()
        begin_keys(s, s_dot, 0)
        your_turn()
        return s[...], s_dot[...]

    plgpu.barrier_wait(k_full.at[0])
    products = pl.run_scoped(begin, product, product)
    arrive(plan.k_free, plan.warpgroups)
    first_key = lambda step: (visited.end - 1 - step) * plan.block_k
    p, p_dot, first_moved = weigh(*products, moved, first_key(0))
    sum_of = lambda x: x.astype(jnp.float32).sum(axis=1)
    p, p_dot = rounded(p), rounded(p_dot)
    carry = full((ROWS, problem.V), 0.0, WGMMA), p, p_dot, first_moved, moved + sum_of(p_dot)

    def visit(step, carry, masked):
        acc, p, p_dot, moved, rounded_moved = carry
        slot, before = slot_of(step, plan.stages), slot_of(step - 1, plan.stages)
        plgpu.barrier_wait(k_full.at[slot])

        def both(refs):
            acc, *results = refs

            def scoped(s, s_dot):
                my_turn()
                begin_keys(s, s_dot, slot)
                plgpu.barrier_wait(v_full.at[before])
                begin_values(acc, p, p_dot, before)
                your_turn()
                products = [plgpu.wgmma_accumulator_load(x, wait_n=moves + values_move) for x in (s, s_dot)]
                arrive(plan.k_free + slot, plan.warpgroups)
                weighed = weigh(*products, moved, first_key(step) if masked else None)
                for ref, value in zip(results, weighed, strict=True):
                    ref[...] = value
                plgpu.wgmma_wait(0)

            pl.run_scoped(scoped, product, product)

        acc, next_p, next_p_dot, moved_on = pl.run_state(both)((plgpu.ACC.init(acc), room, room, moved))
        arrive(plan.v_free + before, plan.warpgroups)
        next_p, next_p_dot = rounded(next_p), rounded(next_p_dot)
        return acc, next_p, next_p_dot, moved_on, rounded_moved + sum_of(next_p_dot)

    acc, p, p_dot, moved, rounded_moved = after_first(visited, visit, carry, problem)
    count = visited.end - visited.begin
    arrive(Q_FREE, plan.warpgroups)
    last = slot_of(count - 1, plan.stages)
    plgpu.barrier_wait(v_full.at[last])
    my_turn()
    acc = pl.run_state(lambda acc: begin_values(acc, p, p_dot, last))(plgpu.ACC.init(acc))
    your_turn()
    return acc, moved, rounded_moved


def _weigh(lse: Array, view: View, plan: Plan, s: Array, s_dot: Array, moved: Array, first_key: Array | None):
    """p, p·ṡ, and the sum of the latter over the keys so far; masked where it is said which key comes first."""
    problem, ok = plan.problem, None
    s = logits(s, problem)
    if first_key is not None:
        ok = seen(view, first_key, s.shape, problem.K % plan.block_k > 0, problem)
        s = s if ok is None else jnp.where(ok, s, -jnp.inf)
    p = jnp.exp2(s * problem.exponent - across(lse, s))
    p_dot = p * s_dot * problem.scale
    if problem.softcap is not None:
        p_dot = p_dot * (1 - s * s)
    if ok is not None and (problem.softcap is not None or view.reach is not None):
        p_dot = jnp.where(ok, p_dot, 0.0)  # s is infinite, or k or its tangent perhaps NaN
    return p, p_dot, moved + p_dot.sum(axis=1)
