"""The gradient of a bias: ds summed, tile by tile of the bias, over what it was broadcast to (see backward.py)."""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.flash_attention import Operands
from ejkernel.types import KernelConfig

from . import logits, masks, sequence_info, tiles
from .problem import Problem, tiled


def bias_gradient(primals: Operands, saved, problem: Problem):
    """dbias [b?,h?,s?,t?] float32.

    The grid has an axis for each axis that bias varies on; programs loop over the axes that it is broadcast along.
    """
    tile = _tile(problem)
    sizes = (problem.B, problem.H, triton.cdiv(problem.S, tile.block_q), triton.cdiv(problem.K, tile.block_k))
    shape = primals.bias.shape
    programs = tuple(size if n > 1 else 1 for n, size in zip(shape, sizes, strict=True))
    loops = tuple(1 if n > 1 else size for n, size in zip(shape, sizes, strict=True))
    return _launch.launch(
        dbias_kernel,
        *primals,
        *saved,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=math.prod(programs),
        config=tile,
        problem=problem,
        PROGRAMS=programs,
        LOOPS=loops,
        BLOCK_Q=tile.block_q,
        BLOCK_K=tile.block_k,
    )


def _tile(problem: Problem) -> KernelConfig:
    """The size of the tile of dbias that one program of dbias_kernel computes; it does not depend on the config."""
    block_q, block_k, warps = 64, 32, 8
    if problem.exact:
        block_q, block_k, warps = (32, 32, 8) if max(problem.D, problem.V) <= 128 else (16, 16, 4)
    limit = _launch.limit_of_environment()
    row = (tiled(problem.D) + tiled(problem.V)) * (4 if problem.exact else 2)
    if limit is not None and (block_q + block_k) * row > limit:
        block_q, block_k, warps = 16, 16, 4
    return KernelConfig(block_q=block_q, block_k=block_k, num_warps=warps, num_stages=1)


@triton.jit
def dbias_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, cu_q, cu_k, dropout,
    do, lse, correction, delta,
    dbias,
    problem: tl.constexpr, PROGRAMS: tl.constexpr, LOOPS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of dbias: the sum of ds over the batches, heads, rows and columns that it was broadcast to.

    PROGRAMS and LOOPS are the sizes of grid and loops along (batches, heads, blocks of rows, blocks of columns). On
    each axis one of the two is 1.
    """
    tile, bias_head, bias_batch = sequence_info.place(PROGRAMS[2] * PROGRAMS[3], PROGRAMS[1])
    row_block, column_block = tile // PROGRAMS[3], tile % PROGRAMS[3]
    _, sequence, q_start, q_len, k_start, k_len = sequence_info.sequence_of(
        row_block, bias_batch, cu_q, cu_k, problem, BLOCK_Q, OF_KEYS=False
    )
    of_tile = sequence_info.SequenceInfo(bias_batch, bias_head, sequence, q_start, q_len, k_start, k_len)
    low, high = sequence_info.band(of_tile, problem)
    total = tl.full([BLOCK_Q, BLOCK_K], 0.0, tl.float32)
    for shared in range(LOOPS[0] * LOOPS[1]):
        batch, head = bias_batch + shared // LOOPS[1], bias_head + shared % LOOPS[1]
        info = sequence_info.SequenceInfo(batch, head, sequence, q_start, q_len, k_start, k_len)
        scale = logits.total_scale(softmax_scale, info, problem)
        for row in range(LOOPS[2]):
            i0 = (row_block + row) * BLOCK_Q
            i = i0 + tl.arange(0, BLOCK_Q)[:, None]
            q_tile = tiles.load_queries(q, i0, info, problem, problem.D, BLOCK_Q, True)
            do_tile = tiles.load_queries(do, i0, info, problem, problem.V, BLOCK_Q, True)
            lse_rows = tiles.load_rows(lse, i0, i, info, problem, True, float("inf"))
            delta_rows = tiles.load_rows(delta, i0, i, info, problem, True, 0.0)
            correction_rows = tiles.load_rows(correction, i0, i, info, problem, True, 1.0)
            for column in range(LOOPS[3]):
                j0 = (column_block + column) * BLOCK_K
                visible = (problem.right is None or j0 <= i0 + BLOCK_Q - 1 + high) and (
                    problem.left is None or j0 + BLOCK_K - 1 >= i0 + low
                )
                if visible:
                    j = j0 + tl.arange(0, BLOCK_K)[None, :]
                    ok = masks.visible(i, j, (q_segment_ids, kv_segment_ids), info, problem)
                    if mask is not None:
                        ok &= masks.unmasked(mask, i, j, info, problem)
                    if tl.max(ok.to(tl.int32)) > 0:
                        k_tile = tiles.load_keys(k, j0, info, problem, problem.D, BLOCK_K, True)
                        v_tile = tiles.load_keys(v, j0, info, problem, problem.V, BLOCK_K, True)
                        product = tiles.over_features(q_tile, k_tile, None)
                        dp = tiles.over_features(do_tile, v_tile, None)
                        _p, _left, ds = logits.weights_and_logit_cotangents(
                            product, dp, lse_rows, correction_rows, delta_rows, scale,
                            logits.biases(bias, i, j, info, problem), dropout, i, j, info, problem,
                        )  # fmt: skip
                        total += tl.where(ok, ds, 0.0)

    strides: tl.constexpr = problem.bias_strides
    i = row_block * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]
    j = column_block * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    if strides.s == 0:
        total = tl.sum(total, 0, keep_dims=True)
    if strides.t == 0:
        total = tl.sum(total, 1, keep_dims=True)
    address, inside = sequence_info.pairs_at(dbias, i, j, of_tile, strides)
    tl.store(address, total, mask=inside)
