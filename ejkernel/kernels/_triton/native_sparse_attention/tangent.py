"""The tangent kernel: o_dot and lse_dot in two passes over the union of the blocks of a tile.

With the weights p = exp(s − lse), and o = p·v,

    s_dot = scale·(q_dot·kᵀ + q·k_dotᵀ)
    lse_dot = Σ_j p ∘ s_dot
    o_dot = (p ∘ (s_dot − lse_dot))·v + p·v_dot

p ∘ (s_dot − lse_dot) is rounded to the dtype of v, and may be small where p ∘ s_dot is large: so lse_dot is summed in a
first pass. With its result c, which is lse_dot up to rounding, (p ∘ (s_dot − c))·v is too large by
Σ_j p ∘ (s_dot − c) times o, which is subtracted.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._native_sparse import lists_of
from ejkernel.kernels._triton import _launch
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from . import tiles
from .configs import queries_of
from .problem import problem_of
from .unions import unions_of


def native_sparse_attention_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: NativeSparseAttentionSpec,
    config: KernelConfig,
) -> Outputs:
    """The tangents of o and lse."""
    problem = problem_of(primals, spec, config.block_q)
    lists, queries = lists_of(primals, problem.size), queries_of(config.block_q, problem.heads)
    count = triton.cdiv(problem.S, queries)
    o_dot, lse_dot = _launch.launch(
        tangent_kernel,
        *primals[:3],
        *tangents[:3],
        outputs.o,
        jnp.where(outputs.lse == -jnp.inf, jnp.inf, outputs.lse),
        lists.limit,
        *unions_of(lists, queries, problem.size)[:4],
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs),
        grid=count * problem.G * problem.B,
        config=config,
        problem=problem,
        TILES=count,
        ROWS=queries * problem.PADDED,
        BLOCK_K=config.block_k,
    )
    return Outputs(o_dot, lse_dot)


@triton.jit
def tangent_kernel(
    q, k, v, q_dot, k_dot, v_dot, o, lse, limit, count, begin, end, members,
    o_dot, lse_dot,
    problem: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    batch, tile, group = tiles.tile_of_program(problem, TILES)
    query = tile * (ROWS // problem.PADDED) + tl.arange(0, ROWS) // problem.PADDED
    row, row_of_head, inside = tiles.rows_of(batch, query, group, problem, ROWS)
    q_tile = tiles.load_rows(q, row, inside, problem.D, problem.WIDTH)
    q_dot_tile = tiles.load_rows(q_dot, row, inside, problem.D, problem.WIDTH)
    limits = tl.load(limit + batch * problem.S + query, mask=inside, other=0)
    of_row = tl.load(lse + row_of_head, mask=inside, other=float("inf"))[:, None] * tiles.LOG2E
    at = (batch * TILES + tile) * problem.G + group
    moved, rest = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    V_WIDTH: tl.constexpr = problem.V_WIDTH
    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    parts: tl.constexpr = (problem.size + BLOCK_K - 1) // BLOCK_K
    steps = tl.load(count + at) * parts
    for step in tl.range(0, steps):
        place = at * problem.entries + step // parts
        stop = tl.load(end + place)
        token = tl.load(begin + place) + step % parts * BLOCK_K + tl.arange(0, BLOCK_K)
        visible = tiles.visible_rows(tl.load(members + place), token, stop, limits, problem, ROWS)
        p, s_dot = weights_and_logits_dot(
            k, k_dot, q_tile, q_dot_tile, of_row, visible, batch, token, stop, group, q_dot, problem
        )
        moved += tl.sum(tl.where(visible, p * s_dot, 0.0), 1)
    for step in tl.range(0, steps):
        place = at * problem.entries + step // parts
        stop = tl.load(end + place)
        token = tl.load(begin + place) + step % parts * BLOCK_K + tl.arange(0, BLOCK_K)
        v_tile = tiles.load_keys(v, batch, token, stop, group, problem, problem.V, problem.V_WIDTH)
        visible = tiles.visible_rows(tl.load(members + place), token, stop, limits, problem, ROWS)
        p, s_dot = weights_and_logits_dot(
            k, k_dot, q_tile, q_dot_tile, of_row, visible, batch, token, stop, group, q_dot, problem
        )
        moving = tl.where(visible, p * (s_dot - moved[:, None]), 0.0)
        rest += tl.sum(moving, 1)
        acc = tiles.added(moving, v_tile, acc)
        if v_dot is not None:
            v_dot_tile = tiles.load_keys(v_dot, batch, token, stop, group, problem, problem.V, problem.V_WIDTH)
            acc = tiles.added(p, v_dot_tile, acc)
    o_tile = tiles.load_rows(o, row, inside, problem.V, problem.V_WIDTH)
    acc -= rest[:, None] * o_tile.to(tl.float32)
    tl.store(lse_dot + row_of_head, moved + rest, mask=inside)
    tiles.store_rows(o_dot, acc, row, inside, problem.V, problem.V_WIDTH)


@triton.jit
def weights_and_logits_dot(
    k, k_dot, q_tile, q_dot_tile, of_row, visible, batch, token, stop, group, q_dot, problem: tl.constexpr
):
    """p and s_dot of a tile of keys."""
    k_tile = tiles.load_keys(k, batch, token, stop, group, problem, problem.D, problem.WIDTH)
    p = tiles.weights(tiles.product(q_tile, k_tile), of_row, visible, problem)
    s_dot = tl.zeros_like(p)
    if q_dot is not None:
        s_dot += tiles.product(q_dot_tile, k_tile)
    if k_dot is not None:
        k_dot_tile = tiles.load_keys(k_dot, batch, token, stop, group, problem, problem.D, problem.WIDTH)
        s_dot += tiles.product(q_tile, k_dot_tile)
    return p, s_dot * problem.scale
