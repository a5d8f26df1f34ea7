"""One more pass over the kept tiles, for sums over rows that gradients need more exactly than lse and o give them.

See rows.py of flash_attention: the correction 1 / Σ p of weights, and Σ_j p̃·dp as a difference to d = Σ_e do·o.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.flash_attention import logits, masks
from ejkernel.kernels._triton.flash_attention import tiles as flash
from ejkernel.types import KernelConfig

from . import lists, tiles
from .call import Call


def exact_rows(call: Call, saved, config: KernelConfig) -> tuple:
    """The correction and Σ_j p̃·dp of every row [B, H, S] float32, from (do, lse, Σ_e do·o)."""
    problem, tile = call.problem, call.tile(config.block_q, config.block_k)
    blocks, of_keys = math.ceil(problem.S / tile[0]), call.lists_of_keys(tile)
    rows = jax.ShapeDtypeStruct((problem.B, problem.H, problem.S), jnp.float32)
    return _launch.launch(
        rows_kernel,
        *call.arrays,
        call.segment_ranges(tile),
        *call.intervals,
        *of_keys,
        *saved,
        out_type=(rows, rows),
        grid=blocks * problem.H * problem.B,
        config=config,
        problem=problem,
        **of_keys.constants,
        CHECKED=call.checked(tile, over_keys=True),
        BLOCKS=blocks,
        BLOCK_Q=tile[0],
        BLOCK_K=tile[1],
    )


@triton.jit
def rows_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, dropout,
    segment_ranges, first_keys, stop_keys, order, counts, entries, do, lse, mean,
    correction, exact_mean,
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
    mean_rows = flash.load_rows(mean, first, rows, info, problem, True, 0.0)
    total, _moved = logits.sinks_weights(sinks, None, lse_rows, info, problem, True)
    off = -total * mean_rows
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
            s = logits.capped(product, scale, bias_tile, problem)
            p, _left, difference = logits.weights_and_differences(
                s, dp, lse_rows, None, mean_rows[:, None], dropout, i, j, info, problem, True
            )
            p, difference = tiles.where_visible(
                (p, difference), 0.0, mask_tile, start, block_range, i, j, segments, first_key, stop_key,
                info, problem, True,
            )  # fmt: skip
            total += tl.sum(p, 1)
            off += tl.sum(difference, 1)

    factor = logits.correction_of(total)
    flash.store_rows(correction, factor, rows, info, problem)
    flash.store_rows(exact_mean, mean_rows + off * factor, rows, info, problem)
