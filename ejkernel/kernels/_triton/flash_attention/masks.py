"""Which queries see which keys in a tile of flash_attention, by mask, lengths, band and segment ids.

Index tensors are given as [rows, 1] and [1, columns], or the other way round where a tile is transposed.
"""

import triton
import triton.language as tl

from .sequence_info import at, band, pairs_at
from .tiles import joined


@triton.jit
def unmasked(mask, i, j, info, problem: tl.constexpr):
    """Which pairs of a tile the mask does not hide; None where there is no mask."""
    if mask is None:
        return
    else:
        strides: tl.constexpr = problem.mask_strides
        address, inside = pairs_at(mask, i, j, info, strides)
        return tl.load(address, mask=inside, other=0) != 0


@triton.jit
def visible(i, j, segments, info, problem: tl.constexpr):
    """Whether query i sees key j, by the lengths, the band and the segment ids."""
    q_segment_ids, kv_segment_ids = segments
    low, high = band(info, problem)
    ok = (i < info.q_len) & (j < info.k_len)
    if problem.left is not None:
        ok &= j >= i + low
    if problem.right is not None:
        ok &= j <= i + high
    if q_segment_ids is not None:
        q_segment_ids = at(q_segment_ids, info.batch, info.q_start, problem.S, 0, 1, 1)
        kv_segment_ids = at(kv_segment_ids, info.batch, info.k_start, problem.K, 0, 1, 1)
        q_segment = tl.load(q_segment_ids + i, mask=i < info.q_len, other=-1)
        kv_segment = tl.load(kv_segment_ids + j, mask=j < info.k_len, other=-1)
        ok &= (q_segment == kv_segment) & (q_segment >= 0)
    return ok


@triton.jit
def where_visible(values, other, unmasked, start, block_range, i, j, segments, info, problem: tl.constexpr,
               EDGES: tl.constexpr):  # fmt: skip
    """The values of a tile where queries see keys, and `other` where they do not.

    Lengths, band and segments are evaluated only in tiles outside of the range of full blocks.
    """
    if unmasked is not None:
        values = where(unmasked, values, other)
    if EDGES and (start < block_range.first_full or start > block_range.last_full):
        values = where(visible(i, j, segments, info, problem), values, other)
    return values


@triton.jit
def where(ok, values, other):
    """tl.where applied to each tensor of a tuple."""
    result = ()
    for n in tl.static_range(len(values)):
        result = joined(result, tl.where(ok, values[n], other))
    return result
