"""The backward kernels: dk and dv by tiles of keys, dq by tiles of queries, each over the tiles of its list.

With the weights p = exp(s − lse) recomputed, p̃ the weights after dropout, and

    dp = do·vᵀ ∘ p̃/p,    delta = Σ_e do·o − dlse,    ds = p ∘ (dp − delta) ∘ (1 − (s/softcap)²)

    dv = p̃ᵀ·do,    dq = scale · ds·k,    dk = scale · dsᵀ·q,    dbias = ds,    dsink = −exp(sink − lse)·delta
    dscale = Σ_ij ds ∘ (q·kᵀ)

where all sums are over the pairs of kept blocks. There are no atomic additions, so gradients repeat bit for bit: the
program of a tile of keys sums over all query heads that share its key/value head. A config has the tile of dk and dv,
whose programs hold block_k keys and stream tiles of block_q queries; that of dq, whose programs hold queries, is the
transposed one.

In float32, and if the gradient of a scale is asked for, the weights are corrected for the rounding of lse, and delta
for that of o (see rows.py).
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.flash_attention import logits, masks, sequence_info
from ejkernel.kernels._triton.flash_attention import tiles as flash
from ejkernel.kernels._triton.flash_attention.configs import transposed_tile
from ejkernel.kernels._triton.flash_attention.problem import seen_lse, weights_of_sinks
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.primitives.flash_attention import Outputs
from ejkernel.types import KernelConfig
from ejkernel.xla_utils.sums import sum_to_shape

from . import lists, tiles
from .bias_gradient import bias_gradient
from .call import Call, call_of
from .fully_masked import zero_fully_masked_queries, zero_hidden_keys
from .rows import exact_rows


def blocksparse_attention_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: BlocksparseAttentionSpec,
    config: KernelConfig,
) -> tuple:
    """The cotangents of the operands named in `wrt`, in that order."""
    call = call_of(primals, spec)
    do = jnp.zeros_like(outputs.o) if cotangents.o is None else cotangents.o
    fully_masked = outputs.lse == -jnp.inf
    if primals.bias is not None:  # a bias of −∞ may fully mask a query, which the kernels do not notice
        do = jnp.where(fully_masked.swapaxes(1, 2)[..., None], jnp.zeros((), do.dtype), do)
    # In fully masked rows o is 0, and the cotangents may be NaN.
    terms = jnp.where(outputs.o == 0, 0, do.astype(jnp.float32) * outputs.o.astype(jnp.float32))
    delta = terms.sum(-1).swapaxes(1, 2)
    lse, correction = seen_lse(outputs.lse), None
    if call.problem.exact or "softmax_scale" in wrt:
        correction, delta = exact_rows(call, (do, lse, delta), transposed_tile(config))
    if cotangents.lse is not None:
        delta -= jnp.where(fully_masked, 0, cotangents.lse)

    saved, gradients = (do, lse, correction, delta), {}
    if "q" in wrt or "softmax_scale" in wrt:
        (k,) = zero_hidden_keys(call, primals.k)
        gradients["q"], dscale = _queries(call.with_arrays(k=k), saved, wrt, transposed_tile(config))
    if "k" in wrt or "v" in wrt:
        q, seen_do = zero_fully_masked_queries(call, primals.q, do)
        gradients |= _keys_and_values(call.with_arrays(q=q), (seen_do, *saved[1:]), wrt, config)
    if "bias" in wrt:
        gradients["bias"] = bias_gradient(call, saved)
    if "softmax_scale" in wrt:
        gradients["softmax_scale"] = sum_to_shape(dscale.sum(2), primals.softmax_scale.shape)
    if "sinks" in wrt:
        weights = weights_of_sinks(primals.sinks, lse, corrected=correction is not None)
        rows = delta if correction is None else delta * correction
        gradients["sinks"] = sum_to_shape(-(weights * rows[..., None]).sum(2), primals.sinks.shape)
    return tuple(gradients[name].astype(getattr(primals, name).dtype) for name in wrt)


def _queries(call: Call, saved, wrt, config: KernelConfig) -> tuple:
    """dq, and the contribution of each row to the gradient of the scale if that is an operand."""
    problem, tile = call.problem, call.tile(config.block_q, config.block_k)
    blocks, of_keys = math.ceil(problem.S / tile[0]), call.lists_of_keys(tile)
    rows = jax.ShapeDtypeStruct((problem.B, problem.H, problem.S), jnp.float32)
    results = {
        "dq": jax.ShapeDtypeStruct.like(call.operands.q) if "q" in wrt else None,
        "dscale": rows if "softmax_scale" in wrt else None,
    }
    return _launch.launch(
        dq_kernel,
        *call.arrays,
        call.segment_ranges(tile),
        *call.intervals,
        *of_keys,
        *saved,
        out_type=tuple(results.values()),
        grid=blocks * problem.H * problem.B,
        config=config,
        problem=problem,
        **of_keys.constants,
        CHECKED=call.checked(tile, over_keys=True),
        BLOCKS=blocks,
        BLOCK_Q=tile[0],
        BLOCK_K=tile[1],
        **{name: None for name, result in results.items() if result is None},
    )


def _keys_and_values(call: Call, saved, wrt, config: KernelConfig) -> dict:
    problem, tile = call.problem, call.tile(config.block_q, config.block_k)
    blocks, of_queries = math.ceil(problem.K / tile[1]), call.lists_of_queries(tile)
    wanted = [name for name in ("k", "v") if name in wrt]
    return _launch.launch(
        dk_dv_kernel,
        *call.arrays,
        call.segment_ranges(tile, of_keys=True),
        *call.intervals,
        *of_queries,
        *saved,
        out_type={name: jax.ShapeDtypeStruct.like(getattr(call.operands, name)) for name in wanted},
        grid=blocks * problem.G * problem.B,
        config=config,
        problem=problem,
        **of_queries.constants,
        CHECKED=call.checked(tile, over_keys=False),
        BLOCKS=blocks,
        Q_BLOCKS=math.ceil(problem.S / tile[0]),
        OF_GROUPS=call.lists_are_of_groups,
        BLOCK_Q=tile[0],
        BLOCK_K=tile[1],
        **{f"d{name}": None for name in ("k", "v") if name not in wrt},
    )


@triton.jit
def dk_dv_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, dropout,
    segment_ranges, first_keys, stop_keys, order, counts, entries, do, lse, correction, delta,
    dk, dv,
    problem: tl.constexpr, LISTS: tl.constexpr, LONGEST: tl.constexpr, CHECKED: tl.constexpr, BLOCKS: tl.constexpr,
    Q_BLOCKS: tl.constexpr, OF_GROUPS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block, kv_head, batch, count, entries = lists.list_of_program(
        order, counts, entries, LISTS, LONGEST, BLOCKS, problem.G
    )
    first, info = tiles.place(block, kv_head * problem.group, batch, problem, BLOCK_K)
    block_range = tiles.full_queries(block, first, info, segment_ranges, first_keys, problem, BLOCKS, BLOCK_Q, BLOCK_K)
    segments = (q_segment_ids, kv_segment_ids)
    j = first + tl.arange(0, BLOCK_K)[:, None]
    k_tile = flash.load_keys(k, first, info, problem, problem.D, BLOCK_K, True)
    v_tile = flash.load_keys(v, first, info, problem, problem.V, BLOCK_K, True)
    dk_tile = flash.zeros(BLOCK_K, problem.D, problem)
    dv_tile = flash.zeros(BLOCK_K, problem.V, problem)
    if count > 0:  # see tiles.py of flash_attention on loops
        coming_head, coming = tiles.queries_of_step(entries, 0, count, info, problem, Q_BLOCKS, OF_GROUPS)
        for n in tl.range(0, tiles.steps_of(count, problem, OF_GROUPS)):
            here, start = sequence_info.of_head(info, coming_head), coming * BLOCK_Q
            coming_head, coming = tiles.queries_of_step(entries, n + 1, count, info, problem, Q_BLOCKS, OF_GROUPS)
            scale = logits.total_scale(softmax_scale, here, problem)
            i = start + tl.arange(0, BLOCK_Q)[None, :]
            q_tile = tiles.load_queries(q, start, first, here, problem, problem.D, BLOCK_Q, BLOCK_K, CHECKED)
            do_tile = tiles.load_queries(do, start, first, here, problem, problem.V, BLOCK_Q, BLOCK_K, CHECKED)
            lse_row = flash.load_rows(lse, start, i, here, problem, CHECKED, float("inf"))
            delta_row = flash.load_rows(delta, start, i, here, problem, CHECKED, 0.0)
            correction_row = flash.load_rows(correction, start, i, here, problem, CHECKED, 1.0)
            first_key = tiles.interval_ends(first_keys, start, i, here, problem, 0)
            stop_key = tiles.interval_ends(stop_keys, start, i, here, problem, 0)
            bias_tile = logits.biases(bias, i, j, here, problem)
            mask_tile = masks.unmasked(mask, i, j, here, problem)
            product = flash.over_features(k_tile, q_tile, None)
            dp = flash.over_features(v_tile, do_tile, None)
            p, left, ds = logits.weights_and_logit_cotangents(
                product, dp, lse_row, correction_row, delta_row, scale, bias_tile, dropout, i, j, here, problem
            )
            p, left, ds = tiles.where_visible(
                (p, left, ds), 0.0, mask_tile, start, block_range, i, j, segments, first_key, stop_key, here,
                problem, True,
            )  # fmt: skip
            if softmax_scale is not None:
                ds *= scale
            if dv is not None:
                dv_tile = flash.over_tokens(left, do_tile, dv_tile)
            if dk is not None:
                dk_tile = flash.over_tokens(ds, q_tile, dk_tile)

    if dk is not None and softmax_scale is None:
        dk_tile = flash.scaled(dk_tile, problem.scale)
    flash.store_keys(dk, dk_tile, first, info, problem, problem.D, BLOCK_K)
    flash.store_keys(dv, dv_tile, first, info, problem, problem.V, BLOCK_K)


@triton.jit
def dq_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, dropout,
    segment_ranges, first_keys, stop_keys, order, counts, entries, do, lse, correction, delta,
    dq, dscale,
    problem: tl.constexpr, LISTS: tl.constexpr, LONGEST: tl.constexpr, CHECKED: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block, head, batch, count, entries = lists.list_of_program(
        order, counts, entries, LISTS, LONGEST, BLOCKS, problem.H
    )
    first, info = tiles.place(block, head, batch, problem, BLOCK_Q)
    rows = first + tl.arange(0, BLOCK_Q)
    i = rows[:, None]
    first_key = tiles.interval_ends(first_keys, first, i, info, problem, 0)
    stop_key = tiles.interval_ends(stop_keys, first, i, info, problem, problem.K)
    block_range = tiles.full_keys(
        block, first, info, segment_ranges, first_key, stop_key, problem, BLOCKS, BLOCK_Q, BLOCK_K
    )
    segments = (q_segment_ids, kv_segment_ids)
    scale = logits.total_scale(softmax_scale, info, problem)
    q_tile = flash.load_queries(q, first, info, problem, problem.D, BLOCK_Q, True)
    do_tile = flash.load_queries(do, first, info, problem, problem.V, BLOCK_Q, True)
    lse_rows = flash.load_rows(lse, first, i, info, problem, True, float("inf"))
    delta_rows = flash.load_rows(delta, first, i, info, problem, True, 0.0)
    correction_rows = flash.load_rows(correction, first, i, info, problem, True, 1.0)
    dq_tile = flash.zeros(BLOCK_Q, problem.D, problem)
    dscale_rows = tl.zeros([BLOCK_Q], tl.float32)
    if count > 0:  # see tiles.py of flash_attention on loops
        coming = lists.entry(entries, 0, count)
        for n in tl.range(0, count):
            start = coming * BLOCK_K
            coming = lists.entry(entries, n + 1, count)
            j = start + tl.arange(0, BLOCK_K)[None, :]
            k_tile = tiles.load_keys(k, start, first, info, problem, problem.D, BLOCK_Q, BLOCK_K, CHECKED)
            v_tile = tiles.load_keys(v, start, first, info, problem, problem.V, BLOCK_Q, BLOCK_K, CHECKED)
            bias_tile = logits.biases(bias, i, j, info, problem)
            mask_tile = masks.unmasked(mask, i, j, info, problem)
            product = flash.over_features(q_tile, k_tile, None)
            dp = flash.over_features(do_tile, v_tile, None)
            p, left, ds = logits.weights_and_logit_cotangents(
                product, dp, lse_rows, correction_rows, delta_rows, scale, bias_tile, dropout, i, j, info, problem
            )
            p, left, ds = tiles.where_visible(
                (p, left, ds), 0.0, mask_tile, start, block_range, i, j, segments, first_key, stop_key,
                info, problem, True,
            )  # fmt: skip
            if dscale is not None:
                # q·kᵀ of a masked pair may be NaN.
                dscale_rows += tl.sum(tl.where(ds == 0.0, 0.0, ds * product), 1)
            if dq is not None:
                dq_tile = flash.over_tokens(ds, k_tile, dq_tile)

    if dscale is not None:
        flash.store_rows(dscale, dscale_rows * problem.scale, rows, info, problem)
    if dq is not None:
        flash.store_queries(dq, flash.scaled(dq_tile, scale), first, info, problem, problem.D, BLOCK_Q)
