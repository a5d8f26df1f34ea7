"""The backward kernel, five products a tile: dk and dv of a block of keys, and what it adds to dq.

With the weights p = exp(s − lse) computed again, and delta = Σ_e do·o − dlse,

    dp = do·vᵀ,    ds = p ∘ (dp − delta),    dv = pᵀ·do,    dk = scale·dsᵀ·q,    dq = scale·ds·k

A block of threads holds 128 keys. Two warpgroups have the keys' dk and dv, 64 keys each, in registers, and compute
every tile with keys as rows, so that p and ds are there as operands of the products that follow. With 192 and 128
features one warpgroup computes p and ds of all keys, and has what of dk there is room for beside them; the other has dv
and the rest of dk. With 256 features both have the same 64 keys, one with dv and the other with dk. The third warpgroup
loads the queries; it takes ds from shared memory, and adds ds·k to dq in device memory. In what order the blocks of
threads get to do that is not known, so dq is not the same in every run. dk and dv are.

The products begin with −lse / scale and with −delta instead of 0, which saves two subtractions and, what matters more,
the registers of these numbers; with a softcap, which comes between, only the latter.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .._launch import (
    ROWS,
    accumulator,
    arrive,
    launch,
    shared,
    slot_of,
    sync,
    whole_eights,
)
from .holders import (
    DONE,
    Q_FREE,
    STORED,
    WARPGROUPS,
    Plan,
    hold_both,
    hold_keys,
    hold_most_keys,
    hold_values,
    hold_values_and_keys,
)
from .problem import LOG2_E, problem_of
from .reach import Reach, reach_of, without_blind, without_unseen


def flash_attention_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec,
    config: KernelConfig,
) -> tuple[Array, ...]:
    problem = problem_of(primals, spec)
    plan = Plan(problem, config.block_q, config.num_stages)
    do = jnp.zeros_like(outputs.o) if cotangents.o is None else cotangents.o
    q, do = without_blind(primals, spec, problem, primals.q, do)
    k, v = without_unseen(primals, spec, problem, primals.k, primals.v)
    delta = jnp.einsum("bshe,bshe->bhs", do, outputs.o, preferred_element_type=jnp.float32)
    if cotangents.lse is not None:
        delta -= cotangents.lse
    # Where nothing is seen, and past the end, the weights are exp(−∞).
    unit = problem.scale if problem.softcap is None else 1 / LOG2_E
    start = jnp.where(outputs.lse == -jnp.inf, -jnp.inf, outputs.lse * (-1 / unit))
    past = [(0, 0), (0, 0), (0, -problem.S % plan.block_q)]
    rows = jnp.pad(start, past, constant_values=-jnp.inf), jnp.pad(-delta, past)
    seen_by = reach_of(primals, spec, problem, plan.keys, plan.block_q, of_keys=True)
    dq, dk, dv = _gradients(*map(whole_eights, (q, k, v, do)), *rows, seen_by, plan)
    found = {"q": (dq * problem.scale).astype(problem.dtype)[:, : problem.S]}
    found |= {"k": dk[:, : problem.K], "v": dv[:, : problem.K]}
    if "sinks" in wrt:
        # A sink is a key without a value: its p is exp(sink − lse), and its dp is 0.
        lse = jnp.where(outputs.lse == -jnp.inf, jnp.inf, outputs.lse)
        dsinks = -(jnp.exp(primals.sinks[:, :, :, None] - lse[:, :, None]) * delta[:, :, None]).sum(-1)
        found["sinks"] = dsinks if primals.sinks.shape[0] > 1 else dsinks.sum(0, keepdims=True)
    return tuple(found[name].astype(getattr(primals, name).dtype) for name in wrt)


def _gradients(q: Array, k: Array, v: Array, do: Array, start: Array, delta: Array, seen_by: Reach | None, plan: Plan):
    """dq in float32 and without the scale, dk and dv."""
    block_q, stages, dtype = plan.block_q, plan.stages, plan.problem.dtype
    dq = jax.new_ref(jnp.zeros(q.shape, jnp.float32))
    dk, dv = launch(
        partial(_kernel, plan=plan),
        "flash_attention_backward",
        (q, k, v, do, start, delta, seen_by, dq),
        out_type=(jax.ShapeDtypeStruct(k.shape, dtype), jax.ShapeDtypeStruct(v.shape, dtype)),
        blocks=plan.blocks,
        warpgroups=WARPGROUPS,
        scratch=dict(
            held=(shared((plan.holders, ROWS, k.shape[3]), dtype), shared((plan.holders, ROWS, v.shape[3]), dtype)),
            streamed=(
                shared((stages, block_q, q.shape[3]), dtype),
                shared((stages, block_q, do.shape[3]), dtype),
                plgpu.SMEM((stages, block_q), jnp.float32),
                plgpu.SMEM((stages, block_q), jnp.float32),
            ),
            ds_tiles=shared((plan.ds_stages, plan.holders, ROWS, block_q), dtype),
            p_tile=shared((plan.holders, ROWS, block_q), dtype) if plan.apart else None,
            dq_tile=shared((block_q, ROWS if plan.apart else q.shape[3]), jnp.float32),
            held_full=plgpu.Barrier(num_arrivals=2 * plan.holders),
            q_full=plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            do_full=plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            ds_free=plgpu.Barrier(num_barriers=plan.ds_stages, num_arrivals=2 if plan.apart and not plan.wide else 1),
        ),
    )
    return jax.freeze(dq), dk, dv


def _kernel(
    q, k, v, do, start, delta, seen_by: Reach | None, dq, dk, dv, *, plan: Plan,
    held, streamed, ds_tiles, p_tile, dq_tile, held_full, q_full, do_full, ds_free,
):  # fmt: skip
    number = lax.axis_index("warpgroup")

    def hold(of: Callable, registers: int, *parts: Part):
        """Computes gradients, and stores them by way of what was held."""
        plgpu.set_max_registers(registers, action="increase")
        plgpu.barrier_wait(held_full)
        body = partial(of, plan, seen_by, held, streamed, ds_tiles, p_tile, (q_full, do_full, ds_free))
        found = pl.run_scoped(body, *(accumulator(ROWS, part.features.stop - part.features.start) for part in parts))
        sync(DONE, WARPGROUPS)
        for gradient, (array, holder, features) in zip(found, parts, strict=True):
            held[array][holder, :, features] = (gradient * (plan.problem.scale, 1.0)[array]).astype(plan.problem.dtype)
        plgpu.commit_smem()
        sync(STORED, 2)
        pl.when(number == 0)(lambda: store(held[0], dk))
        pl.when(number == 1)(lambda: store(held[1], dv))

    def store(tile, out):
        first, kv_head, batch = plan.tile()
        for holder in range(plan.holders):
            plgpu.copy_smem_to_gmem(tile.at[holder], out.at[batch, pl.ds(first + holder * ROWS, ROWS), kv_head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def load_and_collect():
        plgpu.set_max_registers(72, action="decrease")
        first, kv_head, batch = plan.tile()
        for holder in range(plan.holders):
            at = batch, pl.ds(first + holder * ROWS, ROWS), kv_head
            for array, tile in zip((k, v), held, strict=True):
                plgpu.copy_gmem_to_smem(array.at[at], tile.at[holder], held_full)
        load = partial(_load, (q, do, start, delta), streamed, (q_full, do_full), plan, seen_by)
        steps = plan.steps(seen_by)
        lax.fori_loop(0, jnp.minimum(steps, plan.stages), lambda step, _: load(step), None)
        plgpu.barrier_wait(held_full)

        def visit(step, _):
            _collect(step, held[0], ds_tiles, ds_free, dq_tile, dq, plan, seen_by)

            @pl.when(step + plan.stages < steps)
            def _():
                sync(Q_FREE + slot_of(step, plan.stages), WARPGROUPS)
                load(step + plan.stages)

        lax.fori_loop(0, steps, visit, None)
        arrive(DONE, WARPGROUPS)
        plgpu.wait_smem_to_gmem(0)

    roles = [partial(hold, *role) for role in _roles(plan, number)]
    holding = roles[0] if len(roles) == 1 else lambda: lax.cond(number == 0, *roles)
    lax.cond(number < 2, holding, load_and_collect)


class Part(NamedTuple):
    """Of a gradient: that of k (0) or v (1), of which block of 64 keys, and which features."""

    array: int
    holder: Array | int
    features: slice


def _roles(plan: Plan, number: Array) -> tuple:
    """How the two warpgroups that hold gradients do it, in how many registers, and what they hold; one role is of both.

    The third warpgroup has 72 registers: with 504 all are given away.
    """
    D, V = plan.problem.D, plan.problem.V
    keys = lambda holder, begin=0, end=D: Part(0, holder, slice(begin, end))
    values = lambda holder: Part(1, holder, slice(0, V))
    if plan.wide:
        return (hold_values, 216, values(0)), (hold_keys, 216, keys(0))
    if plan.apart:
        most = hold_most_keys, 208, keys(0, ROWS), keys(1, ROWS)
        return most, (hold_values_and_keys, 224, keys(0, 0, ROWS), keys(1, 0, ROWS), values(0), values(1))
    return ((hold_both, 216, keys(number), values(number)),)


def _load(arrays, tiles, full_barriers, plan: Plan, seen_by: Reach | None, step: Array) -> None:
    """Begins to load what belongs to the queries of a step."""
    (q, do, start, delta), (q_tiles, do_tiles, start_tiles, delta_tiles) = arrays, tiles
    q_full, do_full = (barrier.at[slot_of(step, plan.stages)] for barrier in full_barriers)
    block, head = plan.place(seen_by, step)
    batch, rows, slot = plan.tile()[2], pl.ds(block * plan.block_q, plan.block_q), slot_of(step, plan.stages)
    plgpu.copy_gmem_to_smem(q.at[batch, rows, head], q_tiles.at[slot], q_full)
    plgpu.copy_gmem_to_smem(start.at[batch, head, rows], start_tiles.at[slot], q_full)
    plgpu.copy_gmem_to_smem(do.at[batch, rows, head], do_tiles.at[slot], do_full)
    plgpu.copy_gmem_to_smem(delta.at[batch, head, rows], delta_tiles.at[slot], do_full)


def _collect(step: Array, k_tile, ds_tiles, ds_free, dq_tile, dq, plan: Plan, seen_by: Reach | None) -> None:
    """Adds ds·k of a step to dq, computed in squares of 64 by 64 for want of registers."""
    slot = slot_of(step, plan.ds_stages)
    block, head = plan.place(seen_by, step)
    height, width = dq_tile.shape
    sync(plan.ds_full + slot, plan.holders + 1)
    for left in range(0, plan.problem.D, width):
        for n, (row, column) in enumerate(itertools.product(range(0, height, ROWS), range(0, width, ROWS))):
            rows, columns = slice(row, row + ROWS), slice(left + column, left + column + ROWS)

            def product(acc, rows=rows, columns=columns):
                for holder in range(plan.holders):
                    plgpu.wgmma(acc, ds_tiles.at[slot, holder, :, rows].T, k_tile.at[holder, :, columns])
                return acc[...]

            square = pl.run_scoped(product, accumulator(ROWS, ROWS))
            if n == 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            dq_tile[rows, column : column + ROWS] = square
        if left + width == plan.problem.D:
            plgpu.barrier_arrive(ds_free.at[slot])
        plgpu.commit_smem()
        at = plan.tile()[2], pl.ds(block * plan.block_q, height), head, slice(left, left + width)
        plgpu.copy_smem_to_gmem(dq_tile, dq.at[at], reduction_op="add")
