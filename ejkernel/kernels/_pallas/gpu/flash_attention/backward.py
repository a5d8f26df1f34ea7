"""The backward kernel, five products a tile: dk and dv of a block of keys, and its contribution to dq.

With the weights p = exp(s − lse) computed again, and delta = Σ_e do·o − dlse,

    dp = do·vᵀ,    ds = p ∘ (dp − delta),    dv = pᵀ·do,    dk = scale·dsᵀ·q,    dq = scale·ds·k,    dbias = ds

A thread block keeps 128 keys and values stationary, and streams blocks of queries. Two consumer warpgroups accumulate
dk and dv in registers, of 64 keys each. They compute every tile with keys as rows, so that p and ds already lie in
registers as the next products want their operands; with head dims of 192 and 128 they compute half of the queries of a
step at a time, because registers are short. With a head dim of 256 both have the same 64 keys, one accumulates dv and
the other dk. The third warpgroup is the producer; it also reads ds from shared memory, and adds ds·k to dq in device
memory by TMA. The order of these additions differs between runs, and so does the rounding of dq, unless `deterministic`
asks for an order (dq_semaphore.py). dk and dv do not depend on it.

The accumulators of q·kᵀ and do·vᵀ start at −lse / scale and −delta instead of 0, which saves two subtractions and, more
important, the registers of these vectors; with a softcap, which is applied in between, only −delta. That of q·kᵀ
starts at bias / scale besides, whose tiles come by TMA as q does. With a mask p is 0 where a bit of its words is
(pairs.py). If dbias is asked for, ds goes to device memory as it lies in shared memory, [b, h, K, S] in 16 bits, and
XLA sums it in float32 over the axes that the bias does not have.
"""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._query_splits import splits_for_cache, splits_of
from ejkernel.kernels._visibility import Visibility, visibility_of
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig
from ejkernel.xla_utils.sums import sum_to_shape

from .._launch import ROWS, either, launch, shared, whole_eights
from .backward_plan import WARPGROUPS, Plan, Shared
from .configs import SHARED_BYTES, check
from .dkv_consumers import consume
from .dq_producer import DqSums, produce
from .dq_semaphore import MOST_IN_GROUP, table_of_ranks
from .feature_tiles import tiles_of, union, views
from .head_dims import row_width
from .hidden_rows import hidden_rows
from .mask_info import (
    MaskInfo,
    fully_masked,
    mask_info_of,
    with_hidden_columns,
    zero_fully_masked_queries,
    zero_hidden_keys,
)
from .pairs import Pairs, pairs_of_keys, tiles_of_bias
from .problem import LOG2_E, Problem, divisor, problem_of, scale_of_heads, weights_of_sinks


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
    given = dict(bias=primals.bias is not None, mask=primals.mask is not None, dbias="bias" in wrt)
    plan = Plan(problem_of(primals, spec), config.block_q, config.num_stages, deterministic, **given)
    check("flash_attention_bwd", config, block_k=(plan.keys,))
    if (size := plan.shared_bytes(plan.ds_stages)) > SHARED_BYTES:
        blocks = f"{plan.block_q} queries and {plan.keys} keys in {plan.stages} stages"
        raise ValueError(f"flash_attention_bwd: {blocks} take {size} bytes of shared memory; there are {SHARED_BYTES}")
    mask_info = mask_info_of(visibility_of(primals, spec).transposed(), plan.keys, plan.block_q)
    if not spec.batch_invariant:
        plan = with_splits(plan)
    return gradients(primals, outputs, cotangents, wrt, spec, mask_info, plan)


def with_splits(plan: Plan) -> Plan:
    """The plan with splits, where there are few tiles, or where heads that share keys do not fit in the L2 cache.

    Where tiles wait in a circle the splits of all have to run at once. Where they add in turn, tiles of a window would
    wait for the splits before those of the tile before, one after the other.
    """
    problem = plan.problem
    tiles, steps = plan.tiles * problem.G * problem.B, plan.blocks * problem.group
    splits = splits_of(tiles, steps, plan.processors, problem.cut and None in (problem.low, problem.high))
    if plan.circular:
        splits = max(1, min(splits, MOST_IN_GROUP // tiles))
    if plan.in_tile_order and None not in (problem.low, problem.high):
        splits = 1
    return replace(plan, splits=splits if splits > 1 else _splits_for_cache(plan))


def _splits_for_cache(plan: Plan) -> int:
    """Those whose dk and dv take no more memory than dq; 1 where it has not been measured, or tiles are alike."""
    problem = plan.problem
    causal = (problem.low is None) != (problem.high is None)
    if plan.deterministic or not causal or problem.masked_by_arrays:
        return 1
    of_query = (problem.D + problem.V) * problem.dtype.itemsize + 4 * problem.D
    most = problem.H * problem.S * problem.D / (problem.G * problem.K * (problem.D + problem.V))
    kv_heads = problem.G * problem.B
    return splits_for_cache(problem.group, kv_heads, plan.tiles, of_query * problem.S, most, plan.processors)


def gradients(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec,
    mask_info: MaskInfo | None,
    plan: Plan,
) -> tuple[Array, ...]:
    """The cotangents of the operands in `wrt`; `mask_info` is the mask of arrays, applied on top of the band."""
    visibility, problem = visibility_of(primals, spec), plan.problem
    do = jnp.zeros_like(outputs.o) if cotangents.o is None else cotangents.o
    q, k, v = primals.q, primals.k, primals.v
    if plan.zeroes_hidden:
        queries, keys = fully_masked(visibility), fully_masked(visibility.transposed())
        mask_info = with_hidden_columns(mask_info, queries, plan.block_q)
        mask_info = mask_info._replace(hidden_rows=hidden_rows(keys, plan.keys))
    else:
        q, do = zero_fully_masked_queries(visibility, q, do)
        k, v = zero_hidden_keys(visibility, k, v)
    delta = jnp.einsum("bshe,bshe->bhs", do, outputs.o, preferred_element_type=jnp.float32)
    if plan.zeroes_hidden:
        delta = jnp.where(queries, 0, delta)
    if cotangents.lse is not None:
        delta -= jnp.where(outputs.lse == -jnp.inf, 0, cotangents.lse)
    # In fully masked rows, and past the end, the weights are exp(−∞) = 0.
    traced = scale_of_heads(primals, spec)
    unit = problem.scale if traced is None else divisor(traced)[:, :, None]
    unit = unit if problem.softcap is None else 1 / LOG2_E
    start = jnp.where(outputs.lse == -jnp.inf, -jnp.inf, outputs.lse * (-1 / unit))
    past = [(0, 0), (0, 0), (0, -problem.S % plan.block_q)]
    rows = jnp.pad(start, past, constant_values=-jnp.inf), jnp.pad(-delta, past)
    pairs = pairs_of_keys(primals, visibility, plan.blocks * plan.block_q, plan.tiles * plan.keys)
    of_keys = None if traced is None else traced[:, :: problem.group]
    dq, dk, dv, *ds = _gradients(*map(whole_eights, (q, k, v, do)), *rows, mask_info, pairs, of_keys, plan)
    scale = problem.scale if traced is None else traced[:, None, :, None]
    found = {"q": (dq * scale).astype(problem.dtype)[:, : problem.S]}
    found |= {"k": dk[:, : problem.K], "v": dv[:, : problem.K]}
    if "softmax_scale" in wrt:
        # dscale = Σ_ij ds_ij·(q·k)_ij = Σ_i q_i·(ds·k)_i; a list of blocks may hide all keys from a query, of any value
        dscale = jnp.einsum("bshd,bshd->bhs", q, dq[:, : problem.S], preferred_element_type=jnp.float32)
        hidden = (queries | (outputs.lse == -jnp.inf)) if plan.zeroes_hidden else outputs.lse == -jnp.inf
        dscale = jnp.where(hidden, 0, dscale).sum(2)
        found["softmax_scale"] = spec.softmax_scale * sum_to_shape(dscale, primals.softmax_scale.shape)
    if plan.dbias:
        found["bias"] = _dbias(ds[0], primals.bias.shape, visibility, problem)
    if "sinks" in wrt:
        # A sink is a key without a value: its p is exp(sink − lse), and its dp is 0.
        lse = jnp.where(outputs.lse == -jnp.inf, jnp.inf, outputs.lse)
        dsinks = -(weights_of_sinks(primals.sinks, lse) * delta[:, :, None]).sum(-1)
        found["sinks"] = dsinks if primals.sinks.shape[0] > 1 else dsinks.sum(0, keepdims=True)
    return tuple(found[name].astype(getattr(primals, name).dtype) for name in wrt)


def _gradients(
    q: Array, k: Array, v: Array, do: Array, start: Array, delta: Array, mask_info: MaskInfo | None,
    pairs: Pairs | None, softmax_scale: Array | None, plan: Plan,
):  # fmt: skip
    """dq in float32 before its factor `scale`, dk and dv; and if that of the bias is asked for, dsᵀ.

    dk and dv of splits are float32, of rows [splits · b · K].
    """
    block_q, stages = plan.block_q, plan.stages
    problem = plan.problem
    tile = lambda leading, parts: union(*views(leading, parts, problem.dtype, plan.widest))
    # Both operands of a product have the same swizzle: ds takes that of k.
    ds_row = row_width(plan.D_parts[0].stop, plan.widest)
    dq_tile = lambda chunk: (shared((block_q, chunk.stop - chunk.start), jnp.float32, 4 * math.gcd(problem.D, 32)),)
    of_k, of_v = len(plan.D_parts), len(plan.V_parts)
    dq, dq_semaphore, ranks = jax.new_ref(jnp.zeros(q.shape, jnp.float32)), None, None
    if plan.deterministic:
        dq_semaphore = jax.new_ref(jnp.zeros((problem.B, problem.H, plan.blocks), jnp.int32))
        ranks = None if mask_info is None else table_of_ranks(mask_info, plan.blocks)
    ds = jax.ShapeDtypeStruct((problem.B, problem.H, problem.K, plan.blocks * block_q), problem.dtype)
    dk, dv, *ds = launch(
        partial(_kernel, plan=plan),
        "flash_attention_backward",
        (q, k, v, do, start, delta, mask_info, pairs, softmax_scale, dq, dq_semaphore, ranks),
        out_type=(*(_of_keys(x, plan) for x in (k, v)), *((ds,) if plan.dbias else ())),
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
            q_full=plgpu.Barrier(num_barriers=stages, num_arrivals=of_k + 1 + plan.bias * plan.key_blocks),
            do_full=plgpu.Barrier(num_barriers=stages, num_arrivals=of_v + 1),
            ds_empty=plgpu.Barrier(num_barriers=plan.ds_stages),
            **(dict(landed=[plgpu.Barrier(num_arrivals=n) for n in (of_k, of_v)]) if plan.zeroes_hidden else {}),
            **(dict(bias_tiles=tiles_of_bias(pairs.bias, stages, plan.key_blocks, block_q, ROWS)) if plan.bias else {}),
        ),
    )
    if plan.splits > 1:
        dk, dv = (x.reshape(plan.splits, *of.shape).sum(0) for x, of in ((dk, k), (dv, v)))
    return jax.freeze(dq), dk, dv, *ds


def _of_keys(x: Array, plan: Plan) -> jax.ShapeDtypeStruct:
    """The gradient of k or v, or those of all splits."""
    if plan.splits == 1:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    batch, keys, *features = x.shape
    return jax.ShapeDtypeStruct((plan.splits * batch * keys, *features), jnp.float32)


def _dbias(ds: Array, shape: tuple[int, ...], visibility: Visibility, problem: Problem) -> Array:
    """The sum of ds over the axes that the bias does not have, of dsᵀ [b, h, K, rows]; where pairs are hidden it may
    never have been written, for blocks are skipped.
    """
    ds = ds[..., : problem.S].swapaxes(2, 3)
    if problem.cut:
        ds = jnp.where(replace(visibility, mask=None).pairs(), ds, 0)
    return sum_to_shape(ds, shape)


def _kernel(
    q, k, v, do, start, delta, mask_info: MaskInfo | None, pairs: Pairs | None, softmax_scale, dq, dq_semaphore, ranks,
    dk, dv, *ds, plan: Plan, kv_tiles, streamed, ds_tiles, p_tile, dq_tiles, kv_full, q_full, do_full, ds_empty,
    bias_tiles=None, landed=(None, None),
):  # fmt: skip
    number = lax.axis_index("warpgroup")
    tiles = Shared(
        *map(tiles_of, (*kv_tiles, *streamed[:2])), *streamed[2:], ds_tiles, p_tile, dq_tiles,
        kv_full, q_full, do_full, ds_empty, tiles_of(bias_tiles) if plan.bias else None,
    )  # fmt: skip
    sums = DqSums(dq, dq_semaphore, ranks, *ds)
    either(
        number < 2,
        lambda: consume(tiles, mask_info, pairs, softmax_scale, dk, dv, number, plan),
        lambda: produce((k, v), (q, do, start, delta), tiles, mask_info, pairs, sums, landed, plan),
    )
