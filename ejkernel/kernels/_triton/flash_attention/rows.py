"""One more pass over the keys, for sums over rows that gradients need more exactly than lse and o give them.

The weights p = exp(s − lse) of a row, sinks included, sum to 1 up to the rounding of lse; the row's correction 1 / Σ p,
by which weights are multiplied, makes up for it. Likewise Σ_j p̃·dp, the weighted mean of dp, equals d = Σ_e do·o up to
the rounding of o and of that sum. It is computed as a difference to d, which is exact if one key has all the weight:

    Σ_j p̃·dp = d + Σ_j (p̃·dp − p·d) / Σ_j p    where dp of a sink is 0

In 16 bits both errors are negligible beside the rounding of p and ds, except in the gradient of a scale, which sums
over all rows.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.flash_attention import Operands
from ejkernel.types import KernelConfig

from . import logits, masks, sequence_info, tiles
from .problem import Problem, segment_ranges_of


def exact_rows(primals: Operands, saved, problem: Problem, config: KernelConfig) -> tuple:
    """The correction and Σ_j p̃·dp of every row [B, H, S] float32, from (do, lse, Σ_e do·o)."""
    blocks = problem.blocks(config.block_q)
    rows = jax.ShapeDtypeStruct((problem.B, problem.H, problem.S), jnp.float32)
    return _launch.launch(
        rows_kernel,
        *primals,
        segment_ranges_of(primals, config.block_q, config.block_k),
        *saved,
        out_type=(rows, rows),
        grid=blocks * problem.H * problem.B,
        config=config,
        problem=problem,
        CHECKED=problem.checked(config.block_k, over_keys=True),
        BLOCKS=blocks,
        BLOCK_Q=config.block_q,
        BLOCK_K=config.block_k,
    )


@triton.jit
def rows_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, cu_q, cu_k, dropout,
    segment_ranges, do, lse, mean,
    correction, exact_mean,
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
    mean_rows = tiles.load_rows(mean, first, rows, info, problem, True, 0.0)
    total, _moved = logits.sinks_weights(sinks, None, lse_rows, info, problem, True)
    off = -total * mean_rows
    if block_range.begin < block_range.end:  # see tiles.py on loops
        for start in tl.range(block_range.begin, block_range.end, BLOCK_K):
            j = start + tl.arange(0, BLOCK_K)[None, :]
            k_tile = tiles.load_keys(k, start, info, problem, problem.D, BLOCK_K, CHECKED)
            v_tile = tiles.load_keys(v, start, info, problem, problem.V, BLOCK_K, CHECKED)
            bias_tile = logits.biases(bias, i, j, info, problem)
            mask_tile = masks.unmasked(mask, i, j, info, problem)
            product = tiles.over_features(q_tile, k_tile, None)
            dp = tiles.over_features(do_tile, v_tile, None)
            s = logits.capped(product, scale, bias_tile, problem)
            p, _left, difference = logits.weights_and_differences(
                s, dp, lse_rows, None, mean_rows[:, None], dropout, i, j, info, problem, True
            )
            p, difference = masks.where_visible(
                (p, difference), 0.0, mask_tile, start, block_range, i, j, segments, info, problem, True
            )
            total += tl.sum(p, 1)
            off += tl.sum(difference, 1)

    factor = logits.correction_of(total)
    tiles.store_rows(correction, factor, rows, info, problem)
    tiles.store_rows(exact_mean, mean_rows + off * factor, rows, info, problem)
