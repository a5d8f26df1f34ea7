"""The backward kernel, five products a tile: dk and dv of a block of keys, and what it adds to dq.

With the weights p = exp(s − lse) computed again, and delta = Σ_e do·o − dlse,

    dp = do·vᵀ,    ds = p ∘ (dp − delta),    dv = pᵀ·do,    dk = scale·dsᵀ·q,    dq = scale·ds·k

128 keys and values of a thread block are stationary, blocks of queries are streamed. Two consumer warpgroups accumulate
dk and dv, of 64 keys each, in registers, and compute every tile with keys as rows, so that p and ds are there as
operands of the products that follow; with 192 and 128 features they do so for half of the queries of a step at a time,
for want of registers. With 256 features both have the same 64 keys, one with dv and the other with dk. The third
warpgroup is the producer; it also takes ds from shared memory, and adds ds·k to dq in device memory. In what order the
blocks of threads get to do that is not known, so dq is not the same in every run, unless that is asked for
(dq_semaphore.py). dk and dv are.

The products begin with −lse / scale and with −delta instead of 0, which saves two subtractions and, what matters more,
the registers of these numbers; with a softcap, which comes between, only the latter.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._visibility import visibility_of
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .._inline import await_rank, count_of, count_up
from .._launch import (
    ROWS,
    accumulator,
    arrive,
    launch,
    shared,
    stage_of,
    sync,
    whole_eights,
)
from .configs import check
from .dkv_consumers import (
    DONE,
    Q_EMPTY,
    STORED,
    WARPGROUPS,
    Plan,
    dk_consumer,
    dk_dv_consumer,
    dv_consumer,
)
from .dq_semaphore import table_of_ranks
from .feature_tiles import load_parts, tiles_of, union, views
from .head_dims import row_width
from .mask_info import MaskInfo, mask_info_of, zero_fully_masked_queries, zero_hidden_keys
from .problem import LOG2_E, problem_of, weights_of_sinks

# Registers of a thread of the two consumer warpgroups, and of the one that loads and accumulates dq: 504 in all.
CONSUMER_REGISTERS, DQ_REGISTERS = 216, 72


def flash_attention_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec,
    config: KernelConfig,
) -> tuple[Array, ...]:
    deterministic = spec.deterministic or spec.batch_invariant
    plan = Plan(problem_of(primals, spec), config.block_q, config.num_stages, deterministic=deterministic)
    check("flash_attention_bwd", config, block_k=(plan.keys,))
    mask_info = mask_info_of(visibility_of(primals, spec).transposed(), plan.keys, plan.block_q)
    return gradients(primals, outputs, cotangents, wrt, spec, mask_info, plan)


def gradients(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec,
    mask_info: MaskInfo | None,
    plan: Plan,
) -> tuple[Array, ...]:
    """Those of the operands that wrt names, where mask_info says which queries see a key besides the band."""
    visibility, problem = visibility_of(primals, spec), plan.problem
    do = jnp.zeros_like(outputs.o) if cotangents.o is None else cotangents.o
    q, do = zero_fully_masked_queries(visibility, primals.q, do)
    k, v = zero_hidden_keys(visibility, primals.k, primals.v)
    delta = jnp.einsum("bshe,bshe->bhs", do, outputs.o, preferred_element_type=jnp.float32)
    if cotangents.lse is not None:
        delta -= jnp.where(outputs.lse == -jnp.inf, 0, cotangents.lse)
    # Where nothing is seen, and past the end, the weights are exp(−∞).
    unit = problem.scale if problem.softcap is None else 1 / LOG2_E
    start = jnp.where(outputs.lse == -jnp.inf, -jnp.inf, outputs.lse * (-1 / unit))
    past = [(0, 0), (0, 0), (0, -problem.S % plan.block_q)]
    rows = jnp.pad(start, past, constant_values=-jnp.inf), jnp.pad(-delta, past)
    dq, dk, dv = _gradients(*map(whole_eights, (q, k, v, do)), *rows, mask_info, plan)
    found = {"q": (dq * problem.scale).astype(problem.dtype)[:, : problem.S]}
    found |= {"k": dk[:, : problem.K], "v": dv[:, : problem.K]}
    if "sinks" in wrt:
        # A sink is a key without a value: its p is exp(sink − lse), and its dp is 0.
        lse = jnp.where(outputs.lse == -jnp.inf, jnp.inf, outputs.lse)
        dsinks = -(weights_of_sinks(primals.sinks, lse) * delta[:, :, None]).sum(-1)
        found["sinks"] = dsinks if primals.sinks.shape[0] > 1 else dsinks.sum(0, keepdims=True)
    return tuple(found[name].astype(getattr(primals, name).dtype) for name in wrt)


def _gradients(
    q: Array, k: Array, v: Array, do: Array, start: Array, delta: Array, mask_info: MaskInfo | None, plan: Plan
):
    """dq in float32 and without the scale, dk and dv."""
    block_q, stages = plan.block_q, plan.stages
    problem = plan.problem
    tile = lambda leading, parts: union(*views(leading, parts, problem.dtype, plan.widest))
    # A product takes the same swizzle of both its operands: ds that of k.
    ds_row = row_width(plan.D_parts[0].stop, plan.widest)
    dq_tile = lambda chunk: (shared((block_q, chunk.stop - chunk.start), jnp.float32, 4 * math.gcd(problem.D, 32)),)
    of_k, of_v = len(plan.D_parts), len(plan.V_parts)
    dq, dq_semaphore, ranks = jax.new_ref(jnp.zeros(q.shape, jnp.float32)), None, None
    if plan.deterministic:
        dq_semaphore = jax.new_ref(jnp.zeros((problem.B, problem.H, plan.blocks), jnp.int32))
        ranks = None if mask_info is None else table_of_ranks(mask_info, plan.blocks)
    dk, dv = launch(
        partial(_kernel, plan=plan),
        "flash_attention_backward",
        (q, k, v, do, start, delta, mask_info, dq, dq_semaphore, ranks),
        out_type=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        blocks=plan.scheduler.blocks,
        warpgroups=WARPGROUPS,
        scratch=dict(
            kv_tiles=tuple(tile((plan.key_blocks, ROWS), parts) for parts in (plan.D_parts, plan.V_parts)),
            streamed=(
                tile((stages, block_q), plan.D_parts),
                tile((stages, block_q), plan.V_parts),
                plgpu.SMEM((stages, block_q), jnp.float32),
                plgpu.SMEM((stages, block_q), jnp.float32),
            ),
            ds_tiles=shared((plan.ds_stages, plan.key_blocks, ROWS, block_q), problem.dtype, 2 * ds_row),
            p_tile=shared((1, ROWS, block_q), problem.dtype) if plan.wide else None,
            dq_tiles=union(*map(dq_tile, {chunk.stop - chunk.start: chunk for chunk in plan.dq_chunks}.values())),
            kv_full=plgpu.Barrier(num_arrivals=plan.key_blocks * (of_k + of_v)),
            q_full=plgpu.Barrier(num_barriers=stages, num_arrivals=of_k + 1),
            do_full=plgpu.Barrier(num_barriers=stages, num_arrivals=of_v + 1),
            ds_empty=plgpu.Barrier(num_barriers=plan.ds_stages),
        ),
    )
    return jax.freeze(dq), dk, dv


def _kernel(
    q, k, v, do, start, delta, mask_info: MaskInfo | None, dq, dq_semaphore, ranks, dk, dv, *, plan: Plan,
    kv_tiles, streamed, ds_tiles, p_tile, dq_tiles, kv_full, q_full, do_full, ds_empty,
):  # fmt: skip
    number, features = lax.axis_index("warpgroup"), (plan.problem.D, plan.problem.V)
    kv_tiles, streamed = tuple(map(tiles_of, kv_tiles)), (*map(tiles_of, streamed[:2]), *streamed[2:])

    def consume(of: Callable, *arrays: int):
        """Accumulates dk or dv or both, and stores them by way of the tiles of k and v."""
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        plgpu.barrier_wait(kv_full)
        body = partial(of, plan, mask_info, kv_tiles, streamed, ds_tiles, p_tile, (q_full, do_full, ds_empty))
        widths = (kv_tiles[array].columns[-1].stop for array in arrays)
        found = pl.run_scoped(body, *(accumulator(ROWS, width) for width in widths))
        sync(DONE, WARPGROUPS)
        for gradient, array in zip(found, arrays, strict=True):
            key_block = 0 if plan.wide else number
            gradient = (gradient * (plan.problem.scale, 1.0)[array]).astype(plan.problem.dtype)
            for tile, of_part in zip(kv_tiles[array].parts, kv_tiles[array].columns, strict=True):
                tile[key_block] = gradient[:, of_part]
        plgpu.commit_smem()
        sync(STORED, 2)
        pl.when(number == 0)(lambda: store(kv_tiles[0], dk, features[0]))
        pl.when(number == 1)(lambda: store(kv_tiles[1], dv, features[1]))

    def store(tiles, out, features):
        first, kv_head, batch = plan.tile()
        for key_block in range(plan.key_blocks):
            keys = pl.ds(first + key_block * ROWS, ROWS)
            for tile, of_part in zip(tiles.copies, tiles.copied(features), strict=True):
                plgpu.copy_smem_to_gmem(tile.at[key_block], out.at[batch, keys, kv_head, of_part])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def produce():
        plgpu.set_max_registers(DQ_REGISTERS, action="decrease")
        first, kv_head, batch = plan.tile()
        for key_block in range(plan.key_blocks):
            keys = pl.ds(first + key_block * ROWS, ROWS)
            for array, tiles, width in zip((k, v), kv_tiles, features, strict=True):
                source = lambda of_part, array=array, keys=keys: array.at[batch, keys, kv_head, of_part]
                load_parts(tiles, key_block, source, width, kv_full)
        load = partial(_load, (q, do, start, delta), streamed, (q_full, do_full), plan, mask_info)
        steps = plan.steps(mask_info)
        lax.fori_loop(0, jnp.minimum(steps, plan.stages), lambda step, _: load(step), None)
        plgpu.barrier_wait(kv_full)

        def semaphore_of(step):
            block, head = plan.place(mask_info, step)
            return dq_semaphore.at[batch, head, block]

        def complete(step):
            plgpu.wait_smem_to_gmem(0)
            count_up(semaphore_of(step))

        def compute(step, _):
            add = partial(_accumulate_dq, step, kv_tiles[0], ds_tiles, ds_empty, dq_tiles, dq, plan, mask_info)
            if plan.deterministic:
                count = count_of(semaphore_of(step))
                due = lambda: await_rank(semaphore_of(step), count, plan.rank(ranks, plan.place(mask_info, step)[0]))
                add(due, (lambda: pl.when(step > 0)(lambda: complete(step - 1))) if plan.signals_late else None)
                if not plan.signals_late:
                    complete(step)
            else:
                add()

            @pl.when(step + plan.stages < steps)
            def _():
                sync(Q_EMPTY + stage_of(step, plan.stages), WARPGROUPS)
                load(step + plan.stages)

        lax.fori_loop(0, steps, compute, None)
        arrive(DONE, WARPGROUPS)
        if plan.deterministic and plan.signals_late:
            pl.when(steps > 0)(lambda: complete(steps - 1))
        else:
            plgpu.wait_smem_to_gmem(0)

    roles = [partial(consume, *role) for role in _roles(plan)]
    holding = roles[0] if len(roles) == 1 else lambda: lax.cond(number == 0, *roles)
    lax.cond(number < 2, holding, produce)


def _roles(plan: Plan) -> tuple:
    """What the two consumer warpgroups compute, and gradients of which arrays: k (0) and v (1); one role is of both."""
    return ((dv_consumer, 1), (dk_consumer, 0)) if plan.wide else ((dk_dv_consumer, 0, 1),)


def _load(arrays, tiles, full_barriers, plan: Plan, mask_info: MaskInfo | None, step: Array) -> None:
    """Begins to load what belongs to the queries of a step."""
    (q, do, start, delta), (q_tiles, do_tiles, start_tiles, delta_tiles), problem = arrays, tiles, plan.problem
    q_full, do_full = (barrier.at[stage_of(step, plan.stages)] for barrier in full_barriers)
    block, head = plan.place(mask_info, step)
    batch, rows, stage = plan.tile()[2], pl.ds(block * plan.block_q, plan.block_q), stage_of(step, plan.stages)
    load_parts(q_tiles, stage, lambda of_part: q.at[batch, rows, head, of_part], problem.D, q_full)
    plgpu.copy_gmem_to_smem(start.at[batch, head, rows], start_tiles.at[stage], q_full)
    load_parts(do_tiles, stage, lambda of_part: do.at[batch, rows, head, of_part], problem.V, do_full)
    plgpu.copy_gmem_to_smem(delta.at[batch, head, rows], delta_tiles.at[stage], do_full)


def _accumulate_dq(
    step: Array, k_tiles, ds_tiles, ds_empty, dq_tiles, dq, plan: Plan, mask_info: MaskInfo | None,
    before_addition: Callable[[], None] = lambda: None, under_first_product: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Adds ds·k of a step to dq, computed in squares of 64 by 64 for want of registers."""
    stage = stage_of(step, plan.ds_stages)
    block, head = plan.place(mask_info, step)
    sync(plan.ds_full + stage, plan.key_blocks + 1)
    for chunk in plan.dq_chunks:
        (dq_tile,) = (tile for (tile,) in dq_tiles if tile.shape[1] == chunk.stop - chunk.start)
        squares = itertools.product(range(0, plan.block_q, ROWS), _columns_of_k(chunk, plan))
        for n, (row, (part, columns, features)) in enumerate(squares):
            rows, k_tile = slice(row, row + ROWS), k_tiles.parts[part]

            begins = n == 0 and chunk == plan.dq_chunks[0]

            def product(acc, rows=rows, k_tile=k_tile, columns=columns, begins=begins):
                for key_block in range(plan.key_blocks):
                    plgpu.wgmma(acc, ds_tiles.at[stage, key_block, :, rows].T, k_tile.at[key_block, :, columns])
                if begins and under_first_product is not None:
                    under_first_product()
                return acc[...]

            square = pl.run_scoped(product, accumulator(ROWS, columns.stop - columns.start))
            if n == 0 and not (begins and under_first_product is not None):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            width = features.stop - features.start
            dq_tile[rows, features.start - chunk.start : features.stop - chunk.start] = square[:, :width]
        if chunk == plan.dq_chunks[-1]:
            plgpu.barrier_arrive(ds_empty.at[stage])
        if chunk == plan.dq_chunks[0]:
            before_addition()
        plgpu.commit_smem()
        at = plan.tile()[2], pl.ds(block * plan.block_q, plan.block_q), head, chunk
        plgpu.copy_smem_to_gmem(dq_tile, dq.at[at], reduction_op="add")


def _columns_of_k(chunk: slice, plan: Plan) -> list[tuple[int, slice, slice]]:
    """For the features of a chunk, 64 at most at a time: the part of k, its columns, and which features these are."""
    found = []
    for n, part in enumerate(plan.D_parts):
        begin, end = max(part.start, chunk.start), min(part.stop, chunk.stop)
        for start in range(begin, end, ROWS):
            stop = min(start + ROWS, part.stop)
            found.append((n, slice(start - part.start, stop - part.start), slice(start, min(stop, end))))
    return found
