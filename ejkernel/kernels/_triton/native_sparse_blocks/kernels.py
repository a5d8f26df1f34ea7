"""The kernel of native_sparse_blocks: a tile of neighbouring queries, with all heads of their group, over mean keys.

With c_x the mean key of block x, over the blocks that end at or before query i:

    p_ihx = exp(scale · q_ih·c_x) / Σ_x' exp(scale · q_ih·c_x')        score_ix = Σ_h p_ihx, over the heads h of a group

The sums over blocks come first, as heads add up only when their weights are normalised, so that the products are
computed twice. Scores of a tile are kept in device memory that the program uses again for its next tile: all scores
together never exist. Mean keys in 16 bits are two numbers, the second what the first leaves, so that a logit is as
exact as one of 17 bits; logits are of base 2.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.native_sparse_attention.configs import padded_group, power_of_two
from ejkernel.kernels._triton.native_sparse_attention.tiles import LOG2E
from ejkernel.primitives.native_sparse_blocks import NativeSparseBlocksSpec, Operands, Outputs
from ejkernel.types import KernelConfig
from ejkernel.xla_utils.parts import parts_of
from ejkernel.xla_utils.sequence_blocks import ended_blocks, mean_keys, places

from .choice import choose, find_best

ROWS_OF_MULTIPROCESSOR = 512
"""Of the tiles that a multiprocessor has at once, as far as its registers allow."""
MOST_SCRATCH = 2**29
"""Bytes of scores of all programs."""
NUMBERS_OF_WARP = 1024
"""That are compared at a time."""


@dataclass(frozen=True)
class Problem:
    """The shapes and options of one call, as a compile-time constant.

    Attributes:
        B, S, H, G, D: batch, queries, query heads, key/value heads, features.
        slots: mean keys.
        size: keys of a block.
        count: blocks of a list.
        scale: the factor of q·c.
        precision: Triton's input_precision of products in float32.
    """

    B: int
    S: int
    H: int
    G: int
    D: int
    slots: int
    size: int
    count: int
    scale: float
    precision: str

    @property
    def heads(self) -> int:
        """The heads of a group."""
        return self.H // self.G

    @property
    def PADDED(self) -> int:
        """The rows of one query in a tile: the heads of a group, padded to a power of two."""
        return padded_group(self.heads)

    @property
    def WIDTH(self) -> int:
        """The features of a tile, a power of two."""
        return power_of_two(self.D)

    @property
    def SCORES(self) -> int:
        """The scores of a query, a power of two."""
        return power_of_two(self.slots)

    @property
    def RUN(self) -> int:
        """The scores of a run."""
        return 1 << (self.SCORES.bit_length() // 2)

    @property
    def RUNS(self) -> int:
        """The runs of the scores of a query."""
        return self.SCORES // self.RUN


def native_sparse_blocks(*operands: Array | None, spec: NativeSparseBlocksSpec, config: KernelConfig) -> Outputs:
    """The lists of blocks [b, s, g, n]."""
    x = Operands(*operands)
    (B, S, H, D), (_, T, G, _) = x.q.shape, x.k.shape
    cuts = None if x.cu_seqlens is None else jnp.broadcast_to(x.cu_seqlens, (B, x.cu_seqlens.shape[1]))
    place = _by_batch(lambda cuts: places(cuts, S, T), cuts, B)
    before = jnp.zeros((B, S), jnp.int32)
    if cuts is not None:
        rows = jax.vmap(lambda cuts: ended_blocks(cuts, T, spec.block_size).before)(cuts)
        before = jnp.take_along_axis(rows, place.sequence, 1)
    means = jax.vmap(lambda k, cuts: mean_keys(k, cuts, spec.block_size), (0, None if cuts is None else 0))(x.k, cuts)
    high, low = (*parts_of(means, x.q.dtype), None)[:2]
    problem = Problem(B, S, H, G, D, means.shape[1], spec.block_size, x.ranks.shape[1], spec.softmax_scale, precision())
    return Outputs(best_blocks(x.q, high, low, before, place.stop, problem, config))


def precision() -> str:
    """Triton's input_precision of products in float32: TF32 in three parts, where there is TF32."""
    return "ieee" if _launch.is_rocm() else "tf32x3"


def _by_batch(f, cuts: Array | None, batch: int):
    """f of the cuts of each batch index, [b, …]."""
    if cuts is not None:
        return jax.vmap(f)(cuts)
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (batch, *a.shape)), f(None))


def best_blocks(
    q: Array, high: Array, low: Array | None, before: Array, stop: Array, problem: Problem, config: KernelConfig
) -> Array:
    """The lists, by as many programs as run at once; each has a tile after another, and scratch for one.

    Args:
        q: queries [b, s, h, d].
        high, low: the mean keys [b, slots, g, d] in q's dtype, and what they leave, or None.
        before: [b, s] int32, the slot of the first block of each query's sequence.
        stop: [b, s] int32, the number of keys that each query sees, of which its own is the last.
        problem: the shapes.
        config: of the kernel.
    """
    queries = max(1, config.block_q // problem.PADDED)
    tiles, rows = triton.cdiv(problem.S, queries) * problem.G * problem.B, queries * problem.PADDED
    at_once = max(1, ROWS_OF_MULTIPROCESSOR // rows) * (_launch.multiprocessors() or 1)
    programs = min(tiles, at_once, max(1, MOST_SCRATCH // (4 * queries * problem.SCORES)))
    numbers, count = NUMBERS_OF_WARP * config.num_warps, triton.next_power_of_2(problem.count)
    lists, *_ = _launch.launch(
        selection_kernel, q, high, low, before, stop,
        out_type=(
            jax.ShapeDtypeStruct((problem.B, problem.S, problem.G, problem.count), jnp.int32),
            jax.ShapeDtypeStruct((programs, queries, problem.SCORES), jnp.float32),
            jax.ShapeDtypeStruct((programs, queries, problem.RUNS, 2), jnp.int32),  # of 64 bits each
        ),
        grid=programs,
        config=config,
        problem=problem, QUERIES=queries, BLOCKS=config.block_k, PROGRAMS=programs, TILES=tiles,
        TOGETHER=max(1, min(queries, numbers // max(problem.RUN, problem.RUNS, count))),
        AHEAD=max(1, min(problem.RUNS, numbers // (queries * problem.RUN))),
        COUNT=count,
    )  # fmt: skip
    return lists


@triton.jit
def selection_kernel(
    q, high, low, before, stop,
    lists, scores, best,
    problem: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr, PROGRAMS: tl.constexpr, TILES: tl.constexpr,
    TOGETHER: tl.constexpr, AHEAD: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    scores += tl.program_id(0).to(tl.int64) * (QUERIES * problem.SCORES)
    best = best.to(tl.pointer_type(tl.int64)) + tl.program_id(0).to(tl.int64) * (QUERIES * problem.RUNS)
    for number in tl.range(tl.program_id(0), TILES, PROGRAMS):
        # Last tiles see most blocks, and come first.
        group, rest = number % problem.G, number // problem.G
        batch, tile = tl.cast(rest % problem.B, tl.int64), (problem.S + QUERIES - 1) // QUERIES - 1 - rest // problem.B
        token = tile * QUERIES
        first, end = score(q, high, low, before, stop, scores, batch, group, token, problem, QUERIES, BLOCKS)
        tl.debug_barrier()
        if problem.count > 2:
            find_best(scores, best, before, stop, batch, token, first, end, problem, QUERIES, AHEAD)
            tl.debug_barrier()
        for row in tl.static_range(0, QUERIES, TOGETHER):
            choose(scores, best, before, stop, lists, batch, group, token, row, first, end, problem, TOGETHER, COUNT)
        tl.debug_barrier()


@triton.jit
def score(
    q, high, low, before, stop, scores, batch, group, token,
    problem: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Stores the scores of a tile's queries from `token` on; the first of the slots that they see, and the end."""
    ROWS: tl.constexpr = QUERIES * problem.PADDED
    row, head = tl.arange(0, ROWS) // problem.PADDED, tl.arange(0, ROWS) % problem.PADDED
    query = token + row
    inside = (query < problem.S) & (head < problem.heads)
    of_query = batch * problem.S + query
    begin = tl.load(before + of_query, mask=inside, other=0)
    ended = tl.load(stop + of_query, mask=inside, other=0) // problem.size
    first = tl.min(tl.where(ended > 0, begin, problem.slots), 0)
    end = tl.max(tl.where(ended > 0, begin + ended, 0), 0)
    # Steps before `edge` are of blocks that all rows see.
    common = tl.min(tl.where(inside, begin + ended, problem.slots), 0) - first
    same = tl.max(tl.where(inside, begin, 0), 0) == first
    edge = first + tl.where(same, tl.maximum(common, 0) // BLOCKS * BLOCKS, 0)
    d = tl.arange(0, problem.WIDTH)[None, :]
    at = ((of_query * problem.H + group * problem.heads + head) * problem.D)[:, None] + d
    q_tile = tl.load(q + at, mask=inside[:, None] & (d < problem.D), other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for slot in tl.range(first, edge, BLOCKS):
        s = logits(q_tile, high, low, slot, end, begin, ended, batch, group, problem, BLOCKS, False)
        m, l = added(m, l, s)
    for slot in tl.range(edge, end, BLOCKS):
        s = logits(q_tile, high, low, slot, end, begin, ended, batch, group, problem, BLOCKS, True)
        m, l = added(m, l, s)
    m = tl.where(m == float("-inf"), 0.0, m)
    share = tl.where(inside & (l > 0.0), 1.0 / tl.where(l == 0.0, 1.0, l), 0.0)
    target = scores + tl.arange(0, QUERIES)[:, None] * problem.SCORES + tl.arange(0, BLOCKS)[None, :] - first
    for slot in tl.range(first, edge, BLOCKS):
        s = logits(q_tile, high, low, slot, end, begin, ended, batch, group, problem, BLOCKS, False)
        tl.store(target + slot, summed(s, m, share, problem, QUERIES, BLOCKS))
    for slot in tl.range(edge, end, BLOCKS):
        s = logits(q_tile, high, low, slot, end, begin, ended, batch, group, problem, BLOCKS, True)
        given = (slot + tl.arange(0, BLOCKS) < end)[None, :]
        tl.store(target + slot, summed(s, m, share, problem, QUERIES, BLOCKS), mask=given)
    return first, end


@triton.jit
def added(m, l, s):
    """The maximum m and the sum l of exp2(s − m) of each row, with the logits s of some more blocks."""
    m_new = tl.maximum(m, tl.max(s, 1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, l * tl.exp2(m - m_safe) + tl.sum(tl.exp2(s - m_safe[:, None]), 1)


@triton.jit
def summed(s, m, share, problem: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr):
    """Σ_h p_ihx of a tile's queries, where share is 1 / l of each row."""
    p = tl.exp2(s - m[:, None]) * share[:, None]
    return tl.sum(tl.reshape(p, [QUERIES, problem.PADDED, BLOCKS]), 1)


@triton.jit
def logits(
    q_tile, high, low, slot, end, begin, ended, batch, group,
    problem: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The logits of base 2 of a tile's rows and the blocks from a slot on; if masked, −∞ where a row sees no block."""
    number, d = slot + tl.arange(0, BLOCKS), tl.arange(0, problem.WIDTH)[None, :]
    at = ((batch * problem.slots + number) * problem.G + group)[:, None] * problem.D + d
    given = d < problem.D
    if MASKED:
        given &= (number < end)[:, None]
    s = tl.dot(q_tile, tl.trans(tl.load(high + at, mask=given, other=0.0)), input_precision=problem.precision)
    if low is not None:
        s = tl.dot(q_tile, tl.trans(tl.load(low + at, mask=given, other=0.0)), s)
    s *= problem.scale * LOG2E
    if MASKED:
        x = number[None, :] - begin[:, None]
        s = tl.where((x >= 0) & (x < ended[:, None]), s, float("-inf"))
    return s
