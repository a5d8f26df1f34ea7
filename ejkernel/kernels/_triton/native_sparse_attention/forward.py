"""The forward kernel: a tile of neighbouring queries, with all heads of their group, over the union of their blocks.

Over the blocks so far, row i has:  m = max_j s_j,  l = Σ_j exp(s_j − m),  acc = Σ_j exp(s_j − m)·v_j, where logits of
keys in blocks that its query does not list are −∞. At the end o = acc / l and lse = m + log l. Logits are of base 2.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike

from ejkernel.kernels._native_sparse import lists_of
from ejkernel.kernels._triton import _launch
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from . import tiles
from .configs import queries_of
from .problem import problem_of
from .unions import unions_of


def native_sparse_attention(
    *operands: jax.Array | None, spec: NativeSparseAttentionSpec, config: KernelConfig
) -> Outputs:
    """o, the attention to the keys of listed blocks, and lse, the logsumexp of each row of logits."""
    return attended(Operands(*operands), spec, config, operands[0].dtype)


def attended(x: Operands, spec: NativeSparseAttentionSpec, config: KernelConfig, dtype: DTypeLike) -> Outputs:
    """The results, o in a dtype."""
    problem = problem_of(x, spec, config.block_q)
    lists, queries = lists_of(x, problem.size), queries_of(config.block_q, problem.heads)
    count = triton.cdiv(problem.S, queries)
    o, lse = _launch.launch(
        forward_kernel,
        *x[:3],
        lists.limit,
        *unions_of(lists, queries, problem.size)[:4],
        out_type=(
            jax.ShapeDtypeStruct((problem.B, problem.S, problem.H, problem.V), dtype),
            jax.ShapeDtypeStruct((problem.B, problem.H, problem.S), jnp.float32),
        ),
        grid=count * problem.G * problem.B,
        config=config,
        problem=problem,
        TILES=count,
        ROWS=queries * problem.PADDED,
        BLOCK_K=config.block_k,
    )
    return Outputs(o, lse)


@triton.jit
def forward_kernel(
    q, k, v, limit, count, begin, end, members,
    o, lse,
    problem: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    batch, tile, group = tiles.tile_of_program(problem, TILES)
    query = tile * (ROWS // problem.PADDED) + tl.arange(0, ROWS) // problem.PADDED
    row, row_of_head, inside = tiles.rows_of(batch, query, group, problem, ROWS)
    q_tile = tiles.load_rows(q, row, inside, problem.D, problem.WIDTH)
    limits = tl.load(limit + batch * problem.S + query, mask=inside, other=0)
    at = (batch * TILES + tile) * problem.G + group
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    V_WIDTH: tl.constexpr = problem.V_WIDTH
    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    scale: tl.constexpr = problem.scale * tiles.LOG2E
    parts: tl.constexpr = (problem.size + BLOCK_K - 1) // BLOCK_K
    for step in tl.range(0, tl.load(count + at) * parts):
        place = at * problem.entries + step // parts
        stop = tl.load(end + place)
        token = tl.load(begin + place) + step % parts * BLOCK_K + tl.arange(0, BLOCK_K)
        k_tile = tiles.load_keys(k, batch, token, stop, group, problem, problem.D, problem.WIDTH)
        v_tile = tiles.load_keys(v, batch, token, stop, group, problem, problem.V, problem.V_WIDTH)
        visible = tiles.visible_rows(tl.load(members + place), token, stop, limits, problem, ROWS)
        s = tl.where(visible, tiles.product(q_tile, k_tile) * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = tl.exp2(m - m_safe)
        p = tl.exp2(s - m_safe[:, None])
        l = l * rescale + tl.sum(p, 1)
        acc = tiles.added(p, v_tile, acc * rescale[:, None])
        m = m_new
    total = tl.where(l == 0.0, 1.0, l)
    tl.store(lse + row_of_head, tl.where(l == 0.0, float("-inf"), (m + tl.log2(total)) * tiles.LN2), mask=inside)
    tiles.store_rows(o, acc / total[:, None], row, inside, problem.V, problem.V_WIDTH)
