"""The sequence that a program of flash_attention works in, and its range of blocks.

A program has one stationary block of queries (or of keys) of one head, and streams the blocks of keys that these
queries see (or of queries that see these keys). Rows i and columns j count within the sequence.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class SequenceInfo(NamedTuple):
    """The head and the sequence that a program works in; in a dense call the sequence is number 0 and begins at 0."""

    batch: tl.tensor
    head: tl.tensor
    sequence: tl.tensor
    q_start: tl.tensor
    q_len: tl.tensor
    k_start: tl.tensor
    k_len: tl.tensor


class BlockRange(NamedTuple):
    """The bounds of the loop over blocks, and the first and the last full block, which need no mask, in tokens."""

    begin: tl.tensor
    end: tl.tensor
    first_full: tl.tensor
    last_full: tl.tensor


@triton.jit
def place(BLOCKS: tl.constexpr, HEADS: tl.constexpr):
    """The block, the head and the batch index of this program."""
    pid = tl.program_id(0)
    return pid % BLOCKS, pid // BLOCKS % HEADS, pid // (BLOCKS * HEADS)


@triton.jit
def queries_of_program(cu_q, cu_k, problem: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The stationary block of queries of this program, its first query within the sequence, and the sequence info."""
    block, head, batch = place(BLOCKS, problem.H)
    if problem.right is not None:
        block = BLOCKS - 1 - block  # longest first: the last blocks see most keys
    first, sequence, q_start, q_len, k_start, k_len = sequence_of(
        block, batch, cu_q, cu_k, problem, BLOCK_Q, OF_KEYS=False
    )
    return block, first, SequenceInfo(batch, head, sequence, q_start, q_len, k_start, k_len)


@triton.jit
def keys_of_program(cu_q, cu_k, problem: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr,
                    SPLITS: tl.constexpr):  # fmt: skip
    """The stationary block of keys of this program, its first key within the sequence, and the sequence info.

    The latter is that of the first query head that shares the keys. The programs of a split follow those of another.
    """
    block, kv_head, batch = place(BLOCKS, problem.G)
    if SPLITS > 1:
        batch = batch % problem.B
    first, sequence, q_start, q_len, k_start, k_len = sequence_of(
        block, batch, cu_q, cu_k, problem, BLOCK_K, OF_KEYS=True
    )
    return block, first, SequenceInfo(batch, kv_head * problem.group, sequence, q_start, q_len, k_start, k_len)


@triton.jit
def split_of_program(problem: tl.constexpr, BLOCKS: tl.constexpr):
    """Which of the programs of a block of keys this is."""
    return tl.program_id(0) // (BLOCKS * problem.G * problem.B)


@triton.jit
def steps_of_split(steps, problem: tl.constexpr, BLOCKS: tl.constexpr, SPLITS: tl.constexpr):
    """The first step of this program, of the steps of all the programs of a block of keys, and the end."""
    if SPLITS == 1:
        return 0, steps
    else:
        split = split_of_program(problem, BLOCKS)
        return steps * split // SPLITS, steps * (split + 1) // SPLITS


@triton.jit
def of_head(info, head):
    """The sequence info of another head."""
    return SequenceInfo(info.batch, head, info.sequence, info.q_start, info.q_len, info.k_start, info.k_len)


@triton.jit
def keys_of_queries(block, first, info, segment_ranges, problem: tl.constexpr, BLOCKS: tl.constexpr,
                    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """The range of the blocks of keys that a block of queries sees."""
    low, high = band(info, problem)
    block_range = block_range_of(
        first, low, high, info.k_len, problem.left is not None, problem.right is not None, BLOCK_Q, BLOCK_K
    )
    return within_segments(block_range, segment_ranges, info.batch, block, BLOCKS, BLOCK_K)


@triton.jit
def queries_of_keys(block, first, info, segment_ranges, problem: tl.constexpr, BLOCKS: tl.constexpr,
                    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """The range of the blocks of queries that see a block of keys."""
    low, high = band(info, problem)
    block_range = block_range_of(
        first, -high, -low, info.q_len, problem.right is not None, problem.left is not None, BLOCK_K, BLOCK_Q
    )
    return within_segments(block_range, segment_ranges, info.batch, block, BLOCKS, BLOCK_Q)


@triton.jit
def sequence_of(block, batch, cu_q, cu_k, problem: tl.constexpr, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr):
    """Where a block of queries (or keys) begins in its sequence, then sequence, q_start, q_len, k_start and k_len.

    Blocks of a packed call are numbered across sequences; sequence n has ceil(length_n / BLOCK) of them. The tokens
    after the last sequence form a sequence N, and those before the first a sequence N + 1: queries without keys, or
    keys without queries.
    """
    if problem.N is None:
        q_len: tl.constexpr = problem.S
        k_len: tl.constexpr = problem.K
        return block * BLOCK, 0, 0, q_len, 0, k_len
    else:
        cu_q += batch * problem.cu_q_strides.b
        cu_k += batch * problem.cu_k_strides.b
        cu = cu_k if OF_KEYS else cu_q
        tokens: tl.constexpr = problem.K if OF_KEYS else problem.S
        n = tl.arange(0, problem.N_PAD)
        starts = tl.where(n == problem.N + 1, 0, tl.load(cu + n, mask=n <= problem.N, other=tokens))
        stops = tl.where(n == problem.N + 1, tl.load(cu), tl.load(cu + n + 1, mask=n < problem.N, other=tokens))
        blocks = (stops - starts + BLOCK - 1) // BLOCK
        sequence = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
        first = (block - tl.sum(tl.where(n < sequence, blocks, 0), 0)) * BLOCK
        here = tl.minimum(sequence, problem.N)
        q_start, k_start = tl.load(cu_q + here), tl.load(cu_k + here)
        after = tl.minimum(sequence + 1, problem.N)
        q_stop, k_stop = tl.load(cu_q + after), tl.load(cu_k + after)
        is_before = sequence == problem.N + 1
        if OF_KEYS:
            k_start = tl.where(is_before, 0, k_start)
            k_stop = tl.where(sequence == problem.N, tokens, tl.where(is_before, tl.load(cu_k), k_stop))
        else:
            q_start = tl.where(is_before, 0, q_start)
            q_stop = tl.where(sequence == problem.N, tokens, tl.where(is_before, tl.load(cu_q), q_stop))
        return first, sequence, q_start, q_stop - q_start, k_start, k_stop - k_start


@triton.jit
def block_range_of(first, low, high, length, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, BLOCK: tl.constexpr,
             STEP: tl.constexpr):  # fmt: skip
    """The block range of the x in [first, first + BLOCK) which see the y in [0, length) with x + low ≤ y ≤ x + high.

    The loop takes STEP of the y that any x sees; tiles from the first to the last full one need no mask.
    """
    begin, end, first_full, last_full = 0, length, 0, length - STEP
    if HAS_LOW:
        begin = tl.maximum(first + low, 0) // STEP * STEP
        first_full = first + BLOCK - 1 + low
    if HAS_HIGH:
        end = tl.minimum(end, first + BLOCK + high)
        last_full = tl.minimum(last_full, first + high + 1 - STEP)
    return BlockRange(begin, end, first_full, last_full)


@triton.jit
def within_segments(block_range, segment_ranges, batch, block, BLOCKS: tl.constexpr, STEP: tl.constexpr):
    """The block range narrowed to tokens that share a segment with the block: see `problem.segment_ranges_of`."""
    begin, end, first_full, last_full = block_range
    if segment_ranges is not None:
        segment_ranges += (batch * BLOCKS + block) * 4
        begin, end = tl.maximum(begin, tl.load(segment_ranges)), tl.minimum(end, tl.load(segment_ranges + 1))
        first_full = tl.maximum(first_full, tl.load(segment_ranges + 2))
        last_full = tl.minimum(last_full, tl.load(segment_ranges + 3) - STEP)
    return BlockRange(begin, end, first_full, last_full)


@triton.jit
def band(info, problem: tl.constexpr):
    """The least and the greatest visible j − i; 0 for an unbounded side."""
    low = info.k_len - info.q_len - problem.left if problem.left is not None else 0
    high = info.k_len - info.q_len + problem.right if problem.right is not None else 0
    return low, high


@triton.jit
def visible_keys(info, problem: tl.constexpr):
    """The range [first, stop) of the keys that any query sees within the band."""
    low, high = band(info, problem)
    begin, end = 0, info.k_len
    if problem.left is not None:
        begin = tl.maximum(low, 0)
    if problem.right is not None:
        end = tl.minimum(end, info.q_len + high)
    return begin, end


@triton.jit
def first_seeing_query(info, problem: tl.constexpr):
    """The first query that sees a key within the band."""
    begin = 0
    if problem.right is not None:
        _low, high = band(info, problem)
        begin = tl.maximum(-high, 0)
    return begin


@triton.jit
def at(ptr, batch, row, ROWS: tl.constexpr, head, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """The pointer to [batch, row, head, 0] of a dense [·, ROWS, HEADS, WIDTH]."""
    return ptr + ((tl.cast(batch, tl.int64) * ROWS + row) * HEADS + head) * WIDTH


@triton.jit
def of_queries(ptr, info, problem: tl.constexpr, WIDTH: tl.constexpr):
    """The pointer to the first query of a sequence in [B, S, H, WIDTH]."""
    return at(ptr, info.batch, info.q_start, problem.S, info.head, problem.H, WIDTH)


@triton.jit
def of_keys(ptr, info, problem: tl.constexpr, WIDTH: tl.constexpr):
    """The pointer to the first key of a sequence in [B, K, G, WIDTH]."""
    return at(ptr, info.batch, info.k_start, problem.K, info.head // problem.group, problem.G, WIDTH)


@triton.jit
def of_rows(ptr, info, problem: tl.constexpr):
    """The pointer to the first query of a sequence in [B, H, S]."""
    return at(ptr, info.batch, info.head, problem.H, info.q_start, problem.S, 1)


@triton.jit
def pairs_at(ptr, i, j, info, strides: tl.constexpr):
    """Pointers to elements (i, j) of this head and sequence in an array with axes (b, h, s, t), and whether they exist.

    Along an axis on which the array is broadcast, of stride 0, the pointers have size 1.
    """
    address = ptr + tl.cast(info.batch, tl.int64) * strides.b + tl.cast(info.head, tl.int64) * strides.h
    address += tl.full([1, 1], 0, tl.int32)
    inside = tl.full([1, 1], True, tl.int1)
    if strides.s != 0:
        address += tl.cast(i + info.q_start, tl.int64) * strides.s
        inside &= i < info.q_len
    if strides.t != 0:
        address += (j + info.k_start) * strides.t
        inside &= j < info.k_len
    return address, inside
