"""The gradient of a bias: ds of the kept tiles summed, tile by tile of the bias, over what it was broadcast to."""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.flash_attention import logits, sequence_info
from ejkernel.kernels._triton.flash_attention import tiles as flash
from ejkernel.kernels._triton.flash_attention.bias_gradient import _tile as config_of
from ejkernel.kernels._triton.flash_attention.problem import broadcast_strides

from . import tiles
from .call import Call
from .fully_masked import pairs


def bias_gradient(call: Call, saved) -> jax.Array:
    """dbias [b?,h?,s?,t?] float32.

    The grid has an axis for each axis that the bias varies on; programs loop over the axes that it is broadcast along.
    """
    problem, config = call.problem, config_of(call.problem)
    tile, shape = call.tile(config.block_q, config.block_k), call.operands.bias.shape
    kept = call.kept(tile).astype(jnp.int8)
    sizes = (problem.B, problem.H, math.ceil(problem.S / tile[0]), math.ceil(problem.K / tile[1]))
    programs = tuple(size if n > 1 else 1 for n, size in zip(shape, sizes, strict=True))
    loops = tuple(1 if n > 1 else size for n, size in zip(shape, sizes, strict=True))
    return _launch.launch(
        dbias_kernel,
        *call.arrays,
        *call.intervals,
        kept,
        *saved,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=math.prod(programs),
        config=config,
        problem=problem,
        KEPT=broadcast_strides(kept),
        PROGRAMS=programs,
        LOOPS=loops,
        BLOCK_Q=tile[0],
        BLOCK_K=tile[1],
    )


@triton.jit
def dbias_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, dropout,
    first_keys, stop_keys, kept, do, lse, correction, delta,
    dbias,
    problem: tl.constexpr, KEPT: tl.constexpr, PROGRAMS: tl.constexpr, LOOPS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of dbias: the sum of ds over the batches, heads, rows and columns that it was broadcast to.

    PROGRAMS and LOOPS are the sizes of grid and loops along (batches, heads, tiles of rows, tiles of columns). On each
    axis one of the two is 1.
    """
    tile, bias_head, bias_batch = sequence_info.place(PROGRAMS[2] * PROGRAMS[3], PROGRAMS[1])
    row_block, column_block = tile // PROGRAMS[3], tile % PROGRAMS[3]
    first, of_tile = tiles.place(row_block, bias_head, bias_batch, problem, BLOCK_Q)
    total = tl.full([BLOCK_Q, BLOCK_K], 0.0, tl.float32)
    for shared in range(LOOPS[0] * LOOPS[1]):
        batch, head = bias_batch + shared // LOOPS[1], bias_head + shared % LOOPS[1]
        for row in range(LOOPS[2]):
            i0, info = tiles.place(row_block + row, head, batch, problem, BLOCK_Q)
            scale = logits.total_scale(softmax_scale, info, problem)
            i = i0 + tl.arange(0, BLOCK_Q)[:, None]
            q_tile = flash.load_queries(q, i0, info, problem, problem.D, BLOCK_Q, True)
            do_tile = flash.load_queries(do, i0, info, problem, problem.V, BLOCK_Q, True)
            lse_rows = flash.load_rows(lse, i0, i, info, problem, True, float("inf"))
            delta_rows = flash.load_rows(delta, i0, i, info, problem, True, 0.0)
            correction_rows = flash.load_rows(correction, i0, i, info, problem, True, 1.0)
            kept_row = kept + tl.cast(batch, tl.int64) * KEPT.b + head * KEPT.h + (row_block + row) * KEPT.s
            for column in range(LOOPS[3]):
                if tl.load(kept_row + (column_block + column) * KEPT.t) != 0:
                    j0 = (column_block + column) * BLOCK_K
                    j = j0 + tl.arange(0, BLOCK_K)[None, :]
                    ok = pairs(
                        mask, q_segment_ids, kv_segment_ids, first_keys, stop_keys, i0, j, info, problem, BLOCK_Q
                    )
                    k_tile = flash.load_keys(k, j0, info, problem, problem.D, BLOCK_K, True)
                    v_tile = flash.load_keys(v, j0, info, problem, problem.V, BLOCK_K, True)
                    product = flash.over_features(q_tile, k_tile, None)
                    dp = flash.over_features(do_tile, v_tile, None)
                    _p, _left, ds = logits.weights_and_logit_cotangents(
                        product, dp, lse_rows, correction_rows, delta_rows, scale,
                        logits.biases(bias, i, j, info, problem), dropout, i, j, info, problem,
                    )  # fmt: skip
                    total += tl.where(ok, ds, 0.0)

    strides: tl.constexpr = problem.bias_strides
    i = first + tl.arange(0, BLOCK_Q)[:, None]
    j = column_block * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    if strides.s == 0:
        total = tl.sum(total, 0, keep_dims=True)
    if strides.t == 0:
        total = tl.sum(total, 1, keep_dims=True)
    address, inside = sequence_info.pairs_at(dbias, i, j, of_tile, strides)
    tl.store(address, total, mask=inside)
