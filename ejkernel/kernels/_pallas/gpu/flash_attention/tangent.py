"""The tangent kernel: those of o and lse from those of q, k and v, in five products a tile and one pass over the keys.

With the weights p = exp(s − lse) computed again, and ṡ = scale·(q̇·kᵀ + q·k̇ᵀ) ∘ (1 − (s/softcap)²),

    lse_dot_i = Σ_j p_ij·ṡ_ij,    o_dot_i = Σ_j p_ij·ṡ_ij·(v_j − o_i) + p_ij·v̇_j

where o is subtracted at the end, times the sum of the p·ṡ as they were rounded for their product with v: so rounding
cancels, and a tangent is exact where all the weight is on one key.

Tiles and warpgroups are those of the forward. A warpgroup has q in registers, and the products with the keys of one
block overlap those with the values of the block before. With 256 features there are registers for neither, and shared
memory for only three tiles of 64 keys beside q and its tangent: k, its tangent, v and its tangent are loaded one after
the other, and the warpgroups issue each product in turn, so that a stage is soon free again. Products with a tangent
that is zero are left out.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._visibility import visibility_of
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .._inline.rows import store_tile
from .._launch import (
    PER_ROW,
    ROWS,
    WGMMA,
    arrive,
    broadcast_rows,
    either,
    launch,
    load_vector,
    shared,
    sync,
    whole_eights,
)
from .configs import check
from .mask_info import MaskInfo, mask_info_of, zero_hidden_keys
from .plan import PING_PONG, Q_EMPTY
from .problem import LOG2_E, BlockRanges, problem_of, weights_of_sinks
from .tangent_rows import Plan, Ring, Rows, Tensors, accumulate, accumulate_wide
from .tiles import View

# Registers of a thread of a consumer and of the producer.
REGISTERS = 240, 24


def flash_attention_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: FlashAttentionSpec,
    config: KernelConfig,
) -> Outputs:
    visibility, problem = visibility_of(primals, spec), problem_of(primals, spec)
    plan = Plan(problem, config.block_q, config.block_k, config.num_stages)
    check("flash_attention_jvp", config, **({"num_stages": (2, 3)} if plan.wide else {}))
    rows = plan.q_tiles * plan.block_q
    padded = lambda x, axis, value: jnp.pad(
        x, [(0, rows - problem.S if axis == n else 0) for n in range(x.ndim)], constant_values=value
    )
    eights = lambda x: None if x is None else whole_eights(x)
    v, v_dot = zero_hidden_keys(visibility, primals.v, tangents.v)
    tensors = Tensors(padded(primals.q, 1, 0), *map(eights, (primals.k, v, tangents.q, tangents.k, v_dot)))
    o = eights(outputs.o)
    # In fully masked rows, and past the end, the weights are exp(−∞) = 0.
    lse = padded(jnp.where(outputs.lse == -jnp.inf, jnp.inf, outputs.lse), 2, jnp.inf)
    of_consumers = lambda width: shared((plan.consumers, ROWS, width), problem.dtype)
    o_dot, lse_dot = launch(
        partial(_kernel, plan=plan),
        "flash_attention_tangent",
        (
            tensors,
            o,
            lse * LOG2_E,
            _sinks_moved(primals, lse, tangents),
            mask_info_of(visibility, plan.block_q, plan.block_k),
        ),
        out_type=(
            jax.ShapeDtypeStruct(o.shape, problem.dtype),
            jax.ShapeDtypeStruct((problem.B, problem.H, rows), jnp.float32),
        ),
        blocks=plan.scheduler.blocks,
        warpgroups=plan.warpgroups,
        scratch=dict(
            q_tile=of_consumers(problem.D) if plan.wide else None,
            q_dot_and_o=plgpu.RefUnion(of_consumers(problem.D), of_consumers(problem.V)),
            lse_tile=plgpu.SMEM((plan.consumers, ROWS), jnp.float32),
            streamed=[_ring(plan, tensors, groups) for groups in plan.rings(tensors)],
            q_full=plgpu.Barrier(num_arrivals=plan.consumers * (1 + plan.wide + (tensors.q_dot is not None))),
            o_full=plgpu.Barrier(num_arrivals=plan.consumers),
        ),
    )
    return Outputs(o_dot[:, : problem.S], lse_dot[:, :, : problem.S])


def _ring(plan: Plan, tensors: Tensors, groups: tuple[tuple[str, ...], ...]) -> tuple[Any, Any]:
    """Shared memory of a ring: the tiles of a group for each stage, and a full barrier for each stage."""
    (width,) = {getattr(tensors, name).shape[-1] for group in groups for name in group}
    tiles = [shared((plan.stages, plan.block_k, width), plan.problem.dtype) for _ in groups[0]]
    return tiles, plgpu.Barrier(num_barriers=plan.stages, num_arrivals=len(groups[0]))


def _sinks_moved(primals: Operands, lse: Array, tangents: Operands) -> Array | None:
    """The contribution of sinks to Σ p·ṡ of the rows, Σ_n exp(sink_n − lse)·sink_dot_n: [b, h, rows]."""
    if primals.sinks is None or tangents.sinks is None:
        return None
    return (weights_of_sinks(primals.sinks, lse) * tangents.sinks[:, :, :, None]).sum(2)


def _kernel(
    tensors: Tensors, o, lse, sinks_moved, mask_info: MaskInfo | None, o_dot, lse_dot, *, plan: Plan,
    q_tile, q_dot_and_o, lse_tile, streamed, q_full, o_full,
):  # fmt: skip
    (q_dot_tile, o_tiles), number = q_dot_and_o, lax.axis_index("warpgroup")
    first, head, batch = plan.tile(jnp.int32(0))
    block_range = plan.block_range(first, head, batch, mask_info)
    rows_of = lambda consumer: pl.ds(first + consumer * ROWS, ROWS)
    rings = [
        Ring(groups, plan.stages, plan.k_empty + n * plan.stages, tiles, full)
        for n, (groups, (tiles, full)) in enumerate(zip(plan.rings(tensors), streamed, strict=True))
    ]

    def consume():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        for stage in range(len(rings) * plan.stages):
            arrive(plan.k_empty + stage, plan.warpgroups)
        pl.when(number == plan.consumers - 1)(lambda: arrive(PING_PONG, 2))
        at = batch, rows_of(number), head
        q, q_dot = q_tile, q_dot_tile
        if not plan.wide:
            q, q_dot = load_vector(tensors.q.at[at], WGMMA, optimized=False), q_dot_tile.at[number]
        plgpu.barrier_wait(q_full)
        view, lse_of_rows = View(batch, first + number * ROWS, mask_info), load_vector(lse_tile.at[number], PER_ROW)
        q_dot = None if tensors.q_dot is None else q_dot
        rows = Rows(plan, q, q_dot, view, block_range, lse_of_rows, rings)
        acc, *moved = (accumulate_wide if plan.wide else accumulate)(rows)
        moved, rounded_moved = (x.sum(axis=1) for x in moved)
        if sinks_moved is not None:
            of_sinks = load_vector(sinks_moved.at[batch, head, rows_of(number)], PER_ROW, optimized=False)
            moved, rounded_moved = moved + of_sinks, rounded_moved + of_sinks
        plgpu.barrier_wait(o_full)
        acc -= broadcast_rows(rounded_moved, acc) * o_tiles[number].astype(jnp.float32)
        store_tile(o_tiles.at[number], acc.astype(plan.problem.dtype))
        lse_tile[number] = moved
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_tiles.at[number], o_dot.at[batch, rows_of(number), head])
        plgpu.copy_smem_to_gmem(lse_tile.at[number], lse_dot.at[batch, head, rows_of(number)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    arrays, tiles, full = (tensors, o, lse), (q_tile, q_dot_tile, o_tiles, lse_tile), (q_full, o_full)
    load = partial(_load, arrays, tiles, full, rings, block_range, (first, head, batch), plan)
    either(number < plan.consumers, consume, load)


def _load(
    arrays: tuple, tiles: tuple, full: tuple, rings: Sequence[Ring], block_range: BlockRanges, place: tuple, plan: Plan
) -> None:
    """The producer warpgroup: q, its tangent and lse of all consumers, then blocks into the rings, and o at the end."""
    (tensors, o, lse), (q_tile, q_dot_tile, o_tiles, lse_tile), (q_full, o_full) = arrays, tiles, full
    first, head, batch = place
    rows_of = lambda consumer: pl.ds(first + consumer * ROWS, ROWS)
    plgpu.set_max_registers(REGISTERS[1], action="decrease")
    for consumer in range(plan.consumers):
        at = batch, rows_of(consumer), head
        if plan.wide:
            plgpu.copy_gmem_to_smem(tensors.q.at[at], q_tile.at[consumer], q_full)
        if tensors.q_dot is not None:
            plgpu.copy_gmem_to_smem(tensors.q_dot.at[at], q_dot_tile.at[consumer], q_full)
        plgpu.copy_gmem_to_smem(lse.at[batch, head, rows_of(consumer)], lse_tile.at[consumer], q_full)

    def block(step, _):
        keys = pl.ds((block_range.end - 1 - step) * plan.block_k, plan.block_k)
        at = batch, keys, lax.div(head, np.int32(plan.problem.group))
        for ring in rings:
            for group in ring.groups:
                stage = ring.stage(group, step)
                sync(ring.empty + stage, plan.warpgroups)
                for name, of_ring in zip(group, ring.tiles, strict=True):
                    plgpu.copy_gmem_to_smem(getattr(tensors, name).at[at], of_ring.at[stage], ring.full.at[stage])

    lax.fori_loop(0, block_range.end - block_range.begin, block, None)
    sync(Q_EMPTY, plan.warpgroups)
    for consumer in range(plan.consumers):
        plgpu.copy_gmem_to_smem(o.at[batch, rows_of(consumer), head], o_tiles.at[consumer], o_full)
