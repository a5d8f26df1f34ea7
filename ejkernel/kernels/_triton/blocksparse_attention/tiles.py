"""Loads and masks the tiles of a list, like tiles.py and masks.py of flash_attention for other hidden tokens.

Index tensors are given as [rows, 1] and [1, columns], or the other way round where a tile is transposed.
"""

import triton
import triton.language as tl

from ejkernel.kernels._triton.flash_attention import masks, sequence_info
from ejkernel.kernels._triton.flash_attention.tiles import expanded, load_tile

from .lists import entry


@triton.jit
def place(block, head, batch, problem: tl.constexpr, BLOCK: tl.constexpr):
    """The first token of a stationary tile, and the sequence info."""
    first, sequence, q_start, q_len, k_start, k_len = sequence_info.sequence_of(
        block, batch, None, None, problem, BLOCK, OF_KEYS=False
    )
    return first, sequence_info.SequenceInfo(batch, head, sequence, q_start, q_len, k_start, k_len)


@triton.jit
def full_keys(block, first, info, segment_ranges, first_key, stop_key, problem: tl.constexpr, BLOCKS: tl.constexpr,
              BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """The full tiles of keys, which need no mask, as a block range whose begin and end are not to be used.

    The intervals of the queries are [rows, 1], or None in a dense call.
    """
    block_range = sequence_info.keys_of_queries(block, first, info, segment_ranges, problem, BLOCKS, BLOCK_Q, BLOCK_K)
    if first_key is not None:
        begin, end, first_full, last_full = block_range
        first_full = tl.maximum(first_full, tl.max(first_key))
        last_full = tl.minimum(last_full, tl.min(stop_key) - BLOCK_K)
        block_range = sequence_info.BlockRange(begin, end, first_full, last_full)
    return block_range


@triton.jit
def full_queries(block, first, info, segment_ranges, first_keys, problem: tl.constexpr, BLOCKS: tl.constexpr,
                 BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """The full tiles of queries, likewise; none in a packed call."""
    block_range = sequence_info.queries_of_keys(block, first, info, segment_ranges, problem, BLOCKS, BLOCK_Q, BLOCK_K)
    if first_keys is not None:
        begin, end, _first_full, last_full = block_range
        block_range = sequence_info.BlockRange(begin, end, problem.S, last_full)
    return block_range


@triton.jit
def interval_ends(ptr, first, rows, info, problem: tl.constexpr, other):
    """The values of [B, S] for a tile of queries that begins at `first`, in the shape of `rows`; None if absent."""
    if ptr is None:
        return
    else:
        i = first + tl.arange(0, rows.numel)
        return expanded(tl.load(ptr + info.batch * problem.S + i, mask=i < problem.S, other=other), rows)


@triton.jit
def where_visible(values, other, unmasked, start, block_range, i, j, segments, first_key, stop_key, info,
                  problem: tl.constexpr, EDGES: tl.constexpr):  # fmt: skip
    """The values of a tile where queries see keys, and `other` where they do not.

    Everything but the mask is evaluated only in tiles outside of the range of full tiles.
    """
    if unmasked is not None:
        values = masks.where(unmasked, values, other)
    if EDGES and (start < block_range.first_full or start > block_range.last_full):
        ok = masks.visible(i, j, segments, info, problem)
        if first_key is not None:
            ok &= (j >= first_key) & (j < stop_key)
        values = masks.where(ok, values, other)
    return values


@triton.jit
def load_keys(ptr, start, first, info, problem: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr,
              BLOCK_K: tl.constexpr, CHECKED: tl.constexpr):  # fmt: skip
    """The keys of a tile of [B, K, G, WIDTH]; None if the array is absent.

    Keys that the band hides from all queries of the stationary tile, which begins at `first`, are zero.
    """
    if ptr is None:
        return
    else:
        low, high = sequence_info.band(info, problem)
        begin, end = 0, info.k_len
        if problem.left is not None:
            begin = tl.maximum(first + low, 0)
        if problem.right is not None:
            end = tl.minimum(end, tl.minimum(first + BLOCK_Q, info.q_len) + high)
        ptr = sequence_info.of_keys(ptr, info, problem, WIDTH)
        return load_tile(ptr, start, begin, end, problem.G, WIDTH, BLOCK_K, CHECKED)


@triton.jit
def load_queries(ptr, start, first, info, problem: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr,
                 BLOCK_K: tl.constexpr, CHECKED: tl.constexpr):  # fmt: skip
    """The queries of a tile of [B, S, H, WIDTH].

    Queries from which the band hides all keys of the stationary tile, which begins at `first`, are zero.
    """
    low, high = sequence_info.band(info, problem)
    begin, end = 0, info.q_len
    if problem.right is not None:
        begin = tl.maximum(first - high, 0)
    if problem.left is not None:
        end = tl.minimum(end, tl.minimum(first + BLOCK_K, info.k_len) - low)
    ptr = sequence_info.of_queries(ptr, info, problem, WIDTH)
    return load_tile(ptr, start, begin, end, problem.H, WIDTH, BLOCK_Q, CHECKED)


@triton.jit
def steps_of(count, problem: tl.constexpr, OF_GROUPS: tl.constexpr):
    """The steps of a loop over the tiles of queries of a tile of keys.

    Its list is for all heads of the group if OF_GROUPS, and otherwise the same for each of them.
    """
    return count if OF_GROUPS or problem.group == 1 else count * problem.group


@triton.jit
def queries_of_step(entries, n, count, info, problem: tl.constexpr, Q_BLOCKS: tl.constexpr, OF_GROUPS: tl.constexpr):
    """The head and the tile of queries of step n, or of the last step: see `lists.entry`."""
    if OF_GROUPS:
        number = entry(entries, n, count)
        return info.head + number // Q_BLOCKS, number % Q_BLOCKS
    elif problem.group == 1:
        return info.head, entry(entries, n, count)
    else:
        n = tl.minimum(n, count * problem.group - 1)
        return info.head + n // count, tl.load(entries + n % count)
