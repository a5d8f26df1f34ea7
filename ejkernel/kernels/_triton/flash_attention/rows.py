"""What a gradient has to know of whole rows more exactly than lse and o tell: one more pass over the keys.

The weights p = exp(s − lse) of a row and its sinks sum to 1 but for the rounding of lse: what they are
multiplied by is the row's correction, 1 / Σ p. And Σ_j p̃·dp, the weighted mean of dp, is d = Σ_e do·o but for the
roundings of o and of that sum:

    Σ_j p̃·dp = d + Σ_j (p̃·dp − p·d) / Σ_j p    where dp of a sink is 0

is summed as the difference that it makes, which is exact where one key has all the weight. In 16 bits neither matters
next to the rounding of p and ds, but for the gradient of a scale, in which all rows add up.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._segments import spans
from ejkernel.kernels._triton import _launch
from ejkernel.primitives.flash_attention import Operands
from ejkernel.types import KernelConfig

from . import logits, tiles
from .problem import Problem


def exact_rows(primals: Operands, saved, problem: Problem, config: KernelConfig) -> tuple:
    """The correction and Σ_j p̃·dp of every row [B, H, S] float32, from (do, lse, Σ_e do·o)."""
    blocks = problem.blocks(config.block_k)
    rows = jax.ShapeDtypeStruct((problem.B, problem.H, problem.S), jnp.float32)
    return _launch.launch(
        rows_kernel,
        *primals,
        spans(primals, config.block_k, config.block_q),
        *saved,
        out_type=(rows, rows),
        grid=blocks * problem.H * problem.B,
        config=config,
        problem=problem,
        CHECKED=problem.checked(config.block_q, over_keys=True),
        BLOCKS=blocks,
        BLOCK_Q=config.block_k,
        BLOCK_K=config.block_q,
    )


@triton.jit
def rows_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, cu_q, cu_k, dropout,
    spans, do, lse, mean,
    correction, exact_mean,
    problem: tl.constexpr, CHECKED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    block, first, frame = tiles.queries_of_program(cu_q, cu_k, problem, BLOCKS, BLOCK_Q)
    segments = (q_segment_ids, kv_segment_ids)
    _, _, _, _, q_len, _, _ = frame
    q = tiles.of_queries(q, frame, problem, problem.D)
    k = tiles.of_keys(k, frame, problem, problem.D)
    v = tiles.of_keys(v, frame, problem, problem.V)
    do = tiles.of_queries(do, frame, problem, problem.V)
    lse = tiles.of_rows(lse, frame, problem)
    mean = tiles.of_rows(mean, frame, problem)

    scale = logits.total_scale(softmax_scale, frame, problem)
    begin, end, first_full, last_full, seen_begin, seen_end = tiles.keys_of_queries(
        block, first, frame, spans, problem, BLOCKS, BLOCK_Q, BLOCK_K
    )
    i = first + tl.arange(0, BLOCK_Q)[:, None]
    q_tile = tiles.load_tile(q, first, 0, q_len, problem.H, problem.D, BLOCK_Q, True)
    do_tile = tiles.load_tile(do, first, 0, q_len, problem.H, problem.V, BLOCK_Q, True)
    lse_rows = tiles.load_rows(lse, first, q_len, BLOCK_Q, True, float("inf"))
    mean_rows = tiles.load_rows(mean, first, q_len, BLOCK_Q, True, 0.0)
    total, _moved = logits.sinks_weights(sinks, None, lse_rows, frame, problem)
    off = -total * mean_rows
    if begin < end:  # see tiles.py on loops
        for start in tl.range(begin, end, BLOCK_K):
            j = start + tl.arange(0, BLOCK_K)[None, :]
            k_tile = tiles.load_tile(k, start, seen_begin, seen_end, problem.G, problem.D, BLOCK_K, CHECKED)
            v_tile = tiles.load_tile(v, start, seen_begin, seen_end, problem.G, problem.V, BLOCK_K, CHECKED)
            bias_tile, mask_tile = None, None
            if bias is not None:
                bias_tile = logits.biases(bias, i, j, frame, problem)
            if mask is not None:
                mask_tile = logits.unmasked(mask, i, j, frame, problem)
            product = tiles.over_features(q_tile, k_tile, None)
            dp = tiles.over_features(do_tile, v_tile, None)
            s = logits.capped(product, scale, bias_tile, problem)
            p, left, difference = logits.weights_and_differences(
                s, dp, lse_rows[:, None], None, mean_rows[:, None], dropout, i, j, frame, problem
            )
            if mask is not None:
                p, left, difference = logits.where_seen(mask_tile, p, left, difference)
            if start < first_full or start > last_full:
                ok = logits.visible(i, j, segments, frame, problem)
                p, left, difference = logits.where_seen(ok, p, left, difference)
            total += tl.sum(p, 1)
            off += tl.sum(difference, 1)

    factor = logits.correction_of(total)
    rows = first + tl.arange(0, BLOCK_Q)
    correction = tiles.of_rows(correction, frame, problem)
    exact_mean = tiles.of_rows(exact_mean, frame, problem)
    tl.store(correction + rows, factor, mask=rows < q_len)
    tl.store(exact_mean + rows, mean_rows + off * factor, mask=rows < q_len)
