"""The kernels of native_sparse_decode_attention: parts of the keys of each branch, and their gated sum.

The keys that a query sees are those of its listed blocks, then those of its window, then the mean keys of the blocks
that have ended, of each as many places as there may be. A program has PART places of one branch, for the query heads of
a group: over them

    m = max_j s_j,    l = Σ_j exp(s_j − m),    o = Σ_j exp(s_j − m)·v_j / l,    lse = m + log l.

A second launch weighs the parts of each branch by exp(lse), and adds up the branches by their gates.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from ejkernel.kernels._native_sparse import listed_before
from ejkernel.kernels._native_sparse_decode import selected_blocks
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.native_sparse_attention.configs import power_of_two
from ejkernel.kernels._triton.native_sparse_attention.tiles import LOG2E
from ejkernel.kernels._triton.native_sparse_blocks import kernels as choice
from ejkernel.primitives.native_sparse_decode_attention import NativeSparseDecodeAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig
from ejkernel.xla_utils.parts import parts_of

from .configs import choice_config, rows_of


@dataclass(frozen=True)
class Problem:
    """The shapes and options of one call, as a compile-time constant.

    Attributes:
        B, K, H, G, D, V: sequences, keys, query heads, key/value heads, features of keys and of values.
        count: blocks of a list.
        size: keys of a block.
        means: mean keys.
        window: keys of the window branch, at most all, or 0.
        part: places of a program.
        rows: of a tile.
        scale: the factor of q·k.
        precision: Triton's input_precision of products in float32.
    """

    B: int
    K: int
    H: int
    G: int
    D: int
    V: int
    count: int
    size: int
    means: int
    window: int
    part: int
    rows: int
    scale: float
    precision: str

    @property
    def heads(self) -> int:
        """The heads of a group."""
        return self.H // self.G

    @property
    def SELECTED(self) -> int:
        """The parts of the selected branch, which come first."""
        return triton.cdiv(self.count * self.size, self.part)

    @property
    def NEAR(self) -> int:
        """The parts of the selected branch and of the window."""
        return self.SELECTED + triton.cdiv(self.window, self.part)

    @property
    def PARTS(self) -> int:
        """The parts of all branches."""
        return self.NEAR + triton.cdiv(self.means, self.part)

    @property
    def WIDTH(self) -> int:
        """The features of a tile of keys, a power of two."""
        return power_of_two(self.D)

    @property
    def V_WIDTH(self) -> int:
        """The features of a tile of values, a power of two."""
        return power_of_two(self.V)


def native_sparse_decode_attention(
    *operands: Array | None, spec: NativeSparseDecodeAttentionSpec, config: KernelConfig
) -> Outputs:
    """o [b,h,e] and the blocks [b,g,n]."""
    x = Operands(*operands)
    (B, H, D), (_, K, G, V) = x.q.shape, x.v.shape
    x = x._replace(sequence_end=jnp.clip(x.sequence_end, 0, K))
    blocks = _blocks(x, spec)
    once = jnp.where(listed_before(blocks), -1, blocks)
    compressed = x.g_cmp is not None
    problem = Problem(
        B, K, H, G, D, V, blocks.shape[2], spec.block_size, x.k_cmp.shape[1] if compressed else 0,
        min(spec.window or 0, K), config.block_q, rows_of(x), spec.softmax_scale, choice.precision(),
    )  # fmt: skip
    k_cmp, v_cmp = (a.astype(x.q.dtype) if compressed else None for a in (x.k_cmp, x.v_cmp))
    parts, lse = _launch.launch(
        part_kernel, x.q, x.k, x.v, k_cmp, v_cmp, once, x.sequence_end,
        out_type=(
            jax.ShapeDtypeStruct((B, G, problem.PARTS, problem.heads, V), jnp.float32),
            jax.ShapeDtypeStruct((B, G, problem.PARTS, problem.heads), jnp.float32),
        ),
        grid=B * G * problem.PARTS,
        config=config,
        problem=problem, STEP=config.block_k,
    )  # fmt: skip
    o = _launch.launch(
        sum_kernel, parts, lse, x.sequence_end, x.g_cmp, x.g_slc, x.g_swa,
        out_type=jax.ShapeDtypeStruct((B, H, V), x.q.dtype),
        grid=B * H,
        config=config,
        problem=problem,
    )  # fmt: skip
    return Outputs(o, blocks)


def _blocks(x: Operands, spec: NativeSparseDecodeAttentionSpec) -> Array:
    """The blocks as they are given, or chosen: by the kernel of native_sparse_blocks where it takes them."""
    config = None if x.block_indices is not None else choice_config(x, spec)
    if config is None:
        return selected_blocks(x, spec)
    (B, H, D), G, stop = x.q.shape, x.k.shape[2], x.sequence_end[:, None]
    high, low = x.k_cmp, None
    if high.dtype != x.q.dtype:
        high, low = (*parts_of(x.k_cmp.astype(jnp.float32), x.q.dtype), None)[:2]
    shapes = B, 1, H, G, D, x.k_cmp.shape[1], spec.block_size, x.ranks.shape[1]
    problem = choice.Problem(*shapes, spec.softmax_scale, choice.precision())
    return choice.best_blocks(x.q[:, None], high, low, jnp.zeros_like(stop), stop, problem, config)[:, 0]


@triton.jit
def part_kernel(
    q, k, v, k_cmp, v_cmp, blocks, sequence_end,
    parts, lse,
    problem: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = problem.rows
    V_WIDTH: tl.constexpr = problem.V_WIDTH
    part, of_group = tl.program_id(0) % problem.PARTS, (tl.program_id(0) // problem.PARTS).to(tl.int64)
    batch, group = of_group // problem.G, of_group % problem.G
    end, row, d = tl.load(sequence_end + batch), tl.arange(0, problem.rows), tl.arange(0, problem.WIDTH)[None, :]
    at = (of_group * problem.heads + row)[:, None] * problem.D + d
    q_tile = tl.load(q + at, mask=(row < problem.heads)[:, None] & (d < problem.D), other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    if part < problem.SELECTED:
        first = part * problem.part
        listed = blocks + of_group * problem.count
        for place in tl.range(first, tl.minimum(first + problem.part, problem.count * problem.size), STEP):
            token = place + tl.arange(0, STEP)
            given = token < problem.count * problem.size
            block = tl.load(listed + token // problem.size, mask=given, other=-1)
            token = block.to(tl.int64) * problem.size + token % problem.size
            given &= (block >= 0) & (token < end)
            m, l, acc = added(m, l, acc, q_tile, k, v, (batch * problem.K + token) * problem.G + group, given, problem)
    elif part < problem.NEAR:
        first = (part - problem.SELECTED) * problem.part
        for place in tl.range(first, tl.minimum(first + problem.part, problem.window), STEP):
            n = place + tl.arange(0, STEP)
            token = end - problem.window + n
            given = (n < problem.window) & (token >= 0)
            m, l, acc = added(m, l, acc, q_tile, k, v, (batch * problem.K + token) * problem.G + group, given, problem)
    elif problem.means > 0:
        first, ended = (part - problem.NEAR) * problem.part, tl.minimum(end // problem.size, problem.means)
        for place in tl.range(first, tl.minimum(first + problem.part, ended), STEP):
            n = place + tl.arange(0, STEP)
            row_of_mean = (batch * problem.means + n) * problem.G + group
            m, l, acc = added(m, l, acc, q_tile, k_cmp, v_cmp, row_of_mean, n < ended, problem)
    e, of_part = tl.arange(0, problem.V_WIDTH)[None, :], (of_group * problem.PARTS + part) * problem.heads + row
    total = tl.where(l == 0.0, 1.0, l)
    inside = row < problem.heads
    tl.store(lse + of_part, tl.where(l == 0.0, float("-inf"), m + tl.log2(total)), mask=inside)
    o = acc / total[:, None]
    tl.store(parts + of_part[:, None] * problem.V + e, o, mask=inside[:, None] & (e < problem.V))


@triton.jit
def added(m, l, acc, q_tile, k, v, row, given, problem: tl.constexpr):
    """The statistics and the sum of a tile with some more keys, of which `row` is the row in k and v."""
    d, e = tl.arange(0, problem.WIDTH)[None, :], tl.arange(0, problem.V_WIDTH)[None, :]
    k_tile = tl.load(k + row[:, None] * problem.D + d, mask=given[:, None] & (d < problem.D), other=0.0)
    v_tile = tl.load(v + row[:, None] * problem.V + e, mask=given[:, None] & (e < problem.V), other=0.0)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=problem.precision) * (problem.scale * LOG2E)
    s = tl.where(given[None, :], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p, alpha = tl.exp2(s - m_safe[:, None]), tl.exp2(m - m_safe)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=problem.precision)
    return m_new, l * alpha + tl.sum(p, 1), acc


@triton.jit
def sum_kernel(parts, lse, sequence_end, g_cmp, g_slc, g_swa, o, problem: tl.constexpr):
    of_head = tl.program_id(0).to(tl.int64)
    batch, head = of_head // problem.H, of_head % problem.H
    first = (batch * problem.G + head // problem.heads) * problem.PARTS * problem.heads + head % problem.heads
    e, alive = tl.arange(0, problem.V_WIDTH), tl.load(sequence_end + batch) > 0
    total = branch(parts, lse, g_slc, of_head, first, alive, e, 0, problem.SELECTED, problem)
    if problem.NEAR > problem.SELECTED:
        total += branch(parts, lse, g_swa, of_head, first, alive, e, problem.SELECTED, problem.NEAR, problem)
    if problem.PARTS > problem.NEAR:
        total += branch(parts, lse, g_cmp, of_head, first, alive, e, problem.NEAR, problem.PARTS, problem)
    tl.store(o + of_head * problem.V + e, total, mask=e < problem.V)


@triton.jit
def branch(
    parts, lse, gate, of_head, first, alive, e, BEGIN: tl.constexpr, END: tl.constexpr, problem: tl.constexpr
):  # fmt: skip
    """gate · Σ_p exp(lse_p)·o_p / Σ_p exp(lse_p) over the parts of a branch; 0 if it has no key."""
    V_WIDTH: tl.constexpr = problem.V_WIDTH
    m, l = float("-inf"), 0.0
    acc = tl.zeros([V_WIDTH], tl.float32)
    for part in tl.range(BEGIN, END):
        at = first + part * problem.heads
        of_part = tl.load(lse + at)
        m_new = tl.maximum(m, of_part)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p, alpha = tl.exp2(of_part - m_safe), tl.exp2(m - m_safe)
        acc = acc * alpha + p * tl.load(parts + at * problem.V + e, mask=e < problem.V, other=0.0)
        m, l = m_new, l * alpha + p
    acc /= tl.where(l == 0.0, 1.0, l)
    if gate is not None:
        # The gates of a sequence without keys may be NaN.
        acc *= tl.where(alive, tl.load(gate + of_head).to(tl.float32), 0.0)
    return acc
