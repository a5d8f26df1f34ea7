"""The backward kernels: dk and dv by blocks of keys, dq by blocks of queries, dbias by tiles of its own shape.

With the weights p = exp(s − lse) recomputed, p̃ the weights after dropout, and

    dp = do·vᵀ ∘ p̃/p,    delta = Σ_e do·o − dlse,    ds = p ∘ (dp − delta) ∘ (1 − (s/softcap)²)

    dv = p̃ᵀ·do,    dq = scale · ds·k,    dk = scale · dsᵀ·q,    dbias = ds,    dsink = −exp(sink − lse)·delta
    dscale = Σ_ij ds ∘ (q·kᵀ)

There are no atomic additions, so gradients repeat bit for bit: the program of a block of keys sums over all query heads
that share its key/value head, or over a split of them (_query_splits.py). A config has the tile of dk and dv, whose
programs hold block_k keys and stream blocks of block_q queries; that of dq, whose programs hold queries, is transposed.

In float32, and if the gradient of a scale is asked for, the weights are corrected for the rounding of lse, and delta
for that of o (see rows.py); not for a split of the keys, whose weights do not sum to 1.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._query_splits import splits_of
from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._triton import _launch
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig
from ejkernel.types.target import DEFAULT_CORE_COUNT
from ejkernel.xla_utils.sums import sum_to_shape

from . import logits, masks, sequence_info, tiles
from .bias_gradient import bias_gradient
from .configs import transposed_tile
from .problem import (
    Problem,
    keys_as_segments,
    problem_of,
    seen_lse,
    segment_ranges_of,
    weights_of_sinks,
    zero_fully_masked_queries,
    zero_hidden_keys,
)
from .rows import exact_rows

# Warps of these programs, of up to 255 registers a thread, that a multiprocessor runs at once.
WARPS_OF_CORE = 8


def flash_attention_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec,
    config: KernelConfig,
) -> tuple:
    """The cotangents of the operands named in `wrt`, in that order."""
    given, primals = primals, keys_as_segments(primals)
    problem = problem_of(primals, spec)
    do = jnp.zeros_like(outputs.o) if cotangents.o is None else cotangents.o
    fully_masked = outputs.lse == -jnp.inf
    if primals.bias is not None:  # a bias of −∞ may fully mask a query, which the kernels do not notice
        do = jnp.where(fully_masked.swapaxes(1, 2)[..., None], jnp.zeros((), do.dtype), do)
    # In fully masked rows o is 0, and the cotangents may be NaN.
    terms = jnp.where(outputs.o == 0, 0, do.astype(jnp.float32) * outputs.o.astype(jnp.float32))
    delta = terms.sum(-1).swapaxes(1, 2)
    lse, correction = seen_lse(outputs.lse), None
    if not problem.split and (problem.exact or "softmax_scale" in wrt):
        correction, delta = exact_rows(primals, (do, lse, delta), problem, transposed_tile(config))
    if cotangents.lse is not None:
        delta -= jnp.where(fully_masked, 0, cotangents.lse)

    saved, gradients = (do, lse, correction, delta), {}
    if "q" in wrt or "softmax_scale" in wrt:
        (k,) = zero_hidden_keys(given, spec, given.k)
        gradients["q"], dscale = _queries(primals._replace(k=k), saved, wrt, problem, transposed_tile(config))
    if "k" in wrt or "v" in wrt:
        q, seen_do = zero_fully_masked_queries(given, spec, given.q, do)
        splits = 1 if spec.batch_invariant else _splits(problem, config)
        gradients |= _keys_and_values(primals._replace(q=q), (seen_do, *saved[1:]), wrt, problem, config, splits)
    if "bias" in wrt:
        gradients["bias"] = bias_gradient(primals, saved, problem)
    if "softmax_scale" in wrt:
        gradients["softmax_scale"] = sum_to_shape(dscale.sum(2), primals.softmax_scale.shape)
    if "sinks" in wrt:
        weights = weights_of_sinks(primals.sinks, lse, corrected=correction is not None)
        rows = delta if correction is None else delta * correction
        gradients["sinks"] = sum_to_shape(-(weights * rows[..., None]).sum(2), primals.sinks.shape)
    return tuple(gradients[name].astype(getattr(primals, name).dtype) for name in wrt)


def _queries(primals: Operands, saved, wrt, problem: Problem, config: KernelConfig) -> tuple:
    """dq, and the contribution of each row to the gradient of the scale if that is an operand."""
    blocks = problem.blocks(config.block_q)
    rows = jax.ShapeDtypeStruct((problem.B, problem.H, problem.S), jnp.float32)
    results = {
        "dq": jax.ShapeDtypeStruct.like(primals.q) if "q" in wrt else None,
        "dscale": rows if "softmax_scale" in wrt else None,
    }
    return _launch.launch(
        dq_kernel,
        *primals,
        segment_ranges_of(primals, config.block_q, config.block_k),
        *saved,
        out_type=tuple(results.values()),
        grid=blocks * problem.H * problem.B,
        config=config,
        problem=problem,
        CHECKED=problem.checked(config.block_k, over_keys=True),
        BLOCKS=blocks,
        BLOCK_Q=config.block_q,
        BLOCK_K=config.block_k,
        **{name: None for name, result in results.items() if result is None},
    )


def _splits(problem: Problem, config: KernelConfig) -> int:
    """The number of programs that share the blocks of queries of a block of keys."""
    tiles = problem.blocks(config.block_k, of_keys=True) * problem.G * problem.B
    steps, cores = problem.blocks(config.block_q) * problem.group, gpu_target().core_count or DEFAULT_CORE_COUNT
    of_core = max(1, WARPS_OF_CORE // config.num_warps)
    return splits_of(tiles, steps, cores * of_core, (problem.left is None) != (problem.right is None))


def _keys_and_values(primals: Operands, saved, wrt, problem: Problem, config: KernelConfig, splits: int) -> dict:
    wanted = [name for name in ("k", "v") if name in wrt]
    blocks = problem.blocks(config.block_k, of_keys=True)
    of_splits = lambda x: jax.ShapeDtypeStruct((splits, *x.shape), jnp.float32)
    result = of_splits if splits > 1 else jax.ShapeDtypeStruct.like
    found = _launch.launch(
        dk_dv_kernel,
        *primals,
        segment_ranges_of(primals, config.block_q, config.block_k, of_keys=True),
        *saved,
        out_type={name: result(getattr(primals, name)) for name in wanted},
        grid=blocks * problem.G * problem.B * splits,
        config=config,
        problem=problem,
        CHECKED=problem.checked(config.block_q, over_keys=False),
        BLOCKS=blocks,
        BLOCK_Q=config.block_q,
        BLOCK_K=config.block_k,
        SPLITS=splits,
        **{f"d{name}": None for name in ("k", "v") if name not in wrt},
    )
    return {name: x.sum(0) if splits > 1 else x for name, x in found.items()}


@triton.jit
def dk_dv_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, cu_q, cu_k, dropout,
    segment_ranges, do, lse, correction, delta,
    dk, dv,
    problem: tl.constexpr, CHECKED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    block, first, info = sequence_info.keys_of_program(cu_q, cu_k, problem, BLOCKS, BLOCK_K, SPLITS)
    block_range = sequence_info.queries_of_keys(block, first, info, segment_ranges, problem, BLOCKS, BLOCK_Q, BLOCK_K)
    segments = (q_segment_ids, kv_segment_ids)
    j = first + tl.arange(0, BLOCK_K)[:, None]
    k_tile = tiles.load_keys(k, first, info, problem, problem.D, BLOCK_K, True)
    v_tile = tiles.load_keys(v, first, info, problem, problem.V, BLOCK_K, True)
    dk_tile = tiles.zeros(BLOCK_K, problem.D, problem)
    dv_tile = tiles.zeros(BLOCK_K, problem.V, problem)
    if block_range.begin < block_range.end:  # see tiles.py on loops
        steps = (block_range.end - block_range.begin + BLOCK_Q - 1) // BLOCK_Q
        begin, end = sequence_info.steps_of_split(steps * problem.group, problem, BLOCKS, SPLITS)
        for step in tl.range(begin, end):  # the heads that share these keys, one after the other
            if problem.group == 1:
                head, start = info.head, block_range.begin + step * BLOCK_Q
            else:
                head, start = info.head + step // steps, block_range.begin + step % steps * BLOCK_Q
            here = sequence_info.of_head(info, head)
            scale = logits.total_scale(softmax_scale, here, problem)
            i = start + tl.arange(0, BLOCK_Q)[None, :]
            q_tile = tiles.load_seeing_queries(q, start, here, problem, problem.D, BLOCK_Q, CHECKED)
            do_tile = tiles.load_seeing_queries(do, start, here, problem, problem.V, BLOCK_Q, CHECKED)
            lse_row = tiles.load_rows(lse, start, i, here, problem, CHECKED, float("inf"))
            delta_row = tiles.load_rows(delta, start, i, here, problem, CHECKED, 0.0)
            correction_row = tiles.load_rows(correction, start, i, here, problem, CHECKED, 1.0)
            bias_tile = logits.biases(bias, i, j, here, problem)
            mask_tile = masks.unmasked(mask, i, j, here, problem)
            product = tiles.over_features(k_tile, q_tile, None)
            dp = tiles.over_features(v_tile, do_tile, None)
            p, left, ds = logits.weights_and_logit_cotangents(
                product, dp, lse_row, correction_row, delta_row, scale, bias_tile, dropout, i, j, here, problem
            )
            p, left, ds = masks.where_visible(
                (p, left, ds), 0.0, mask_tile, start, block_range, i, j, segments, here, problem, True
            )
            if softmax_scale is not None:
                ds *= scale
            if dv is not None:
                dv_tile = tiles.over_tokens(left, do_tile, dv_tile)
            if dk is not None:
                dk_tile = tiles.over_tokens(ds, q_tile, dk_tile)

    if dk is not None and softmax_scale is None:
        dk_tile = tiles.scaled(dk_tile, problem.scale)
    if SPLITS > 1:
        split = tl.cast(sequence_info.split_of_program(problem, BLOCKS), tl.int64) * problem.B * problem.K * problem.G
        if dk is not None:
            dk += split * problem.D
        if dv is not None:
            dv += split * problem.V
    tiles.store_keys(dk, dk_tile, first, info, problem, problem.D, BLOCK_K)
    tiles.store_keys(dv, dv_tile, first, info, problem, problem.V, BLOCK_K)


@triton.jit
def dq_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, cu_q, cu_k, dropout,
    segment_ranges, do, lse, correction, delta,
    dq, dscale,
    problem: tl.constexpr, CHECKED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    block, first, info = sequence_info.queries_of_program(cu_q, cu_k, problem, BLOCKS, BLOCK_Q)
    block_range = sequence_info.keys_of_queries(block, first, info, segment_ranges, problem, BLOCKS, BLOCK_Q, BLOCK_K)
    segments = (q_segment_ids, kv_segment_ids)
    scale = logits.total_scale(softmax_scale, info, problem)
    rows = first + tl.arange(0, BLOCK_Q)
    i = rows[:, None]
    q_tile = tiles.load_queries(q, first, info, problem, problem.D, BLOCK_Q, True)
    do_tile = tiles.load_queries(do, first, info, problem, problem.V, BLOCK_Q, True)
    lse_rows = tiles.load_rows(lse, first, i, info, problem, True, float("inf"))
    delta_rows = tiles.load_rows(delta, first, i, info, problem, True, 0.0)
    correction_rows = tiles.load_rows(correction, first, i, info, problem, True, 1.0)
    dq_tile = tiles.zeros(BLOCK_Q, problem.D, problem)
    dscale_rows = tl.zeros([BLOCK_Q], tl.float32)
    if block_range.begin < block_range.end:  # see tiles.py on loops
        for start in tl.range(block_range.begin, block_range.end, BLOCK_K):
            j = start + tl.arange(0, BLOCK_K)[None, :]
            k_tile = tiles.load_keys(k, start, info, problem, problem.D, BLOCK_K, CHECKED)
            v_tile = tiles.load_keys(v, start, info, problem, problem.V, BLOCK_K, CHECKED)
            bias_tile = logits.biases(bias, i, j, info, problem)
            mask_tile = masks.unmasked(mask, i, j, info, problem)
            product = tiles.over_features(q_tile, k_tile, None)
            dp = tiles.over_features(do_tile, v_tile, None)
            p, left, ds = logits.weights_and_logit_cotangents(
                product, dp, lse_rows, correction_rows, delta_rows, scale, bias_tile, dropout, i, j, info, problem
            )
            p, left, ds = masks.where_visible(
                (p, left, ds), 0.0, mask_tile, start, block_range, i, j, segments, info, problem, True
            )
            if dscale is not None:
                # q·kᵀ of a masked pair may be NaN.
                dscale_rows += tl.sum(tl.where(ds == 0.0, 0.0, ds * product), 1)
            if dq is not None:
                dq_tile = tiles.over_tokens(ds, k_tile, dq_tile)

    if dscale is not None:
        tiles.store_rows(dscale, dscale_rows * problem.scale, rows, info, problem)
    if dq is not None:
        tiles.store_queries(dq, tiles.scaled(dq_tile, scale), first, info, problem, problem.D, BLOCK_Q)
