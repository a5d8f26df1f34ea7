"""The tangent kernel: those of o and lse from those of q, k and v, in five products a tile and one pass over the keys.

With the weights p = exp(s − lse) computed again, and ṡ = scale·(q̇·kᵀ + q·k̇ᵀ) ∘ (1 − (s/softcap)²),

    lse_dot_i = Σ_j p_ij·ṡ_ij,    o_dot_i = Σ_j p_ij·ṡ_ij·(v_j − o_i) + p_ij·v̇_j

where o is taken off at the end, by the sum of what the p·ṡ of the row were rounded to for their product with v: so a
tangent is exact where all the weight is on one key.

Tiles and warpgroups are those of the forward: the products with the keys of one block are under way at once with those
with the values of the block before, where registers suffice for the weights of both. Products with a tangent that is
zero are left out.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .._launch import (
    PER_ROW,
    ROWS,
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
from .configs import check
from .plan import Q_FREE, REGISTERS, TURN
from .problem import LOG2_E, problem_of
from .reach import Reach, reach_of, without_unseen
from .tangent_rows import Plan, Rows, Tensors, accumulate, accumulate_wide
from .tiles import View


def flash_attention_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: FlashAttentionSpec,
    config: KernelConfig,
) -> Outputs:
    check("flash_attention_jvp", config, (128,), (32, 64))
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
        blocks=plan.order.blocks,
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
        view, lse_of_rows = View(batch, first + number * ROWS, reach), load_vector(lse_tile.at[number], PER_ROW)
        rows, moved = Rows(plan, tiles, view, visited, lse_of_rows, k_full, v_full), full((ROWS,), 0.0, PER_ROW)
        if sinks_moved is not None:
            moved = load_vector(sinks_moved.at[batch, head, rows_of(number)], PER_ROW, optimized=False)
        acc, moved, rounded_moved = (accumulate_wide if plan.wide else accumulate)(rows, moved)
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
