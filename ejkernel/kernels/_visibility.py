"""The keys that each query of attention sees, for the kernels of all platforms.

Query i of a sequence of S queries and K keys is aligned with key i' = i + K − S. It sees key j if all of the given
conditions hold:

    i' − left ≤ j ≤ i' + right        the band: the window, which causality ends at the diagonal
    i and j are in one sequence       cu_seqlens
    both have one id, not negative    segment ids
    the mask says so

Band and sequences give every query an interval of keys, and so every block of queries a range of blocks of keys.
`transposed` exchanges queries and keys, for the queries that see each key. Only segment ids and masks, which may hide
single tokens, take memory for all pairs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import band


class BlockRanges(NamedTuple):
    """Blocks of keys begin ≤ n < end, of which full_begin ≤ n < full_end need no mask: every query sees every key."""

    begin: Any
    end: Any
    full_begin: Any
    full_end: Any

    def at_least_one(self, blocks: int) -> "BlockRanges":
        """At least one of the `blocks`, for kernels that have to write fully masked queries too; full ones among them.

        Where there are none of the full ones, full_begin is full_end.
        """
        end = jnp.clip(self.end, 1, blocks)
        begin = jnp.minimum(self.begin, end - 1)
        full_end = jnp.clip(self.full_end, begin, end)
        return BlockRanges(begin, end, jnp.clip(self.full_begin, begin, full_end), full_end)


@dataclass(frozen=True, eq=False)
class Visibility:
    """The keys that each query sees.

    Attributes:
        q_len, kv_len: the sizes of the two axes.
        left, right: the band i' − left ≤ j ≤ i' + right; None where it is unbounded.
        cu_seqlens: of queries and of keys, [b?, sequences + 1]; None where the whole axes are one sequence.
        segment_ids: [b, q_len] and [b, kv_len]; None without.
        mask: [b?, h?, q_len?, kv_len?] bool; None without.
    """

    q_len: int
    kv_len: int
    left: int | None
    right: int | None
    cu_seqlens: tuple[Array, Array] | None = None
    segment_ids: tuple[Array, Array] | None = None
    mask: Array | None = None

    @property
    def low(self) -> int | None:
        """The least j − i of the band, where the axes are one sequence."""
        return None if self.left is None or self.cu_seqlens is not None else self.kv_len - self.q_len - self.left

    @property
    def high(self) -> int | None:
        """The greatest j − i of the band, where the axes are one sequence."""
        return None if self.right is None or self.cu_seqlens is not None else self.kv_len - self.q_len + self.right

    @property
    def is_banded(self) -> bool:
        return self.left is not None or self.right is not None

    @property
    def most_keys(self) -> int:
        """The largest number of keys that the band allows a query."""
        return most_keys(self.left, self.right, self.kv_len)

    @property
    def masks_queries(self) -> bool:
        """Whether the band or the sequences may leave a query without keys, if there are keys."""
        if self.cu_seqlens is not None:
            return True
        before = self.high is not None and (jax.export.is_symbolic_dim(self.high) or self.high < 0)
        return before or (self.left is not None and self.left < 0)

    @property
    def masks_keys(self) -> bool:
        """Whether the band or the sequences may hide a key from every query."""
        return self.transposed().masks_queries

    def transposed(self) -> "Visibility":
        """Which queries see a key: the same with queries and keys exchanged."""
        exchanged = lambda pair: None if pair is None else pair[::-1]
        mask = None if self.mask is None else self.mask.swapaxes(2, 3)
        sizes = self.kv_len, self.q_len, self.right, self.left
        return Visibility(*sizes, exchanged(self.cu_seqlens), exchanged(self.segment_ids), mask)

    def intervals(self, xp: Any = jnp) -> tuple[Any, Any]:
        """The keys first ≤ j < stop that band and sequences allow each query: int32 [b?, q_len], 0 and 0 for none.

        `xp` is numpy for constants, where there are no cu_seqlens.
        """
        query = xp.arange(self.q_len, dtype=xp.int32)[None]
        if self.cu_seqlens is None:
            aligned, begin, end = query + (self.kv_len - self.q_len), 0, self.kv_len
        else:
            number, is_inside, cu_q, cu_k = *self.sequences(), *self.cu_seqlens
            of_sequence = lambda cuts: jnp.take_along_axis(*_same_batch(cuts, number), 1)
            begin, end = of_sequence(cu_k[:, :-1]), jnp.where(is_inside, of_sequence(cu_k[:, 1:]), 0)
            aligned = query - of_sequence(cu_q[:, 1:]) + end
        return interval(aligned, self.left, self.right, begin, end, xp)

    def sequences(self) -> tuple[Array, Array]:
        """The number of the sequence that a query is in, and whether it is in any: [b?, q_len], given cu_seqlens.

        The number is that of a sequence everywhere.
        """
        cuts = self.cu_seqlens[0]
        query = jnp.arange(self.q_len, dtype=jnp.int32)[None]
        number = (cuts[:, 1:, None] <= query[:, None]).sum(1, dtype=jnp.int32)
        is_inside = (query >= cuts[:, :1]) & (number < cuts.shape[1] - 1)
        return jnp.minimum(number, cuts.shape[1] - 2), is_inside

    def pairs(self) -> Array:
        """Whether each query sees each key, bool [b?, h?, q_len, kv_len], to be reduced at once by the caller."""
        key = jnp.arange(self.kv_len, dtype=jnp.int32)[None, None, None]
        if self.cu_seqlens is None:  # without a table of intervals, for which XLA would compile kernels of their own
            query = jnp.arange(self.q_len, dtype=jnp.int32)[None, None, :, None]
            ahead = key - (query + (self.kv_len - self.q_len))
            visible = jnp.ones_like(ahead, bool) if self.left is None else -self.left <= ahead
            visible = visible if self.right is None else visible & (ahead <= self.right)
        else:
            first, stop = (x[:, None, :, None] for x in self.intervals())
            visible = (first <= key) & (key < stop)
        if self.segment_ids is not None:
            q_ids, kv_ids = self.segment_ids
            q_ids, kv_ids = q_ids[:, None, :, None], kv_ids[:, None, None]
            visible &= (q_ids == kv_ids) & (q_ids >= 0)
        return visible if self.mask is None else visible & self.mask

    def fully_masked(self) -> Array:
        """Whether a query sees no key, bool [b?, h?, q_len]. Transposed: whether no query sees a key."""
        if self.segment_ids is not None or (self.mask is not None and 1 not in self.mask.shape[2:]):
            return ~self.pairs().any(3)
        first, stop = (x[:, None] for x in self.intervals())
        if self.mask is None:
            return first >= stop
        if self.mask.shape[3] == 1:
            return (first >= stop) | ~self.mask[:, :, :, 0]
        shown = jnp.pad(self.mask[:, :, 0].astype(jnp.int32), ((0, 0), (0, 0), (1, 0)))
        before = jnp.cumsum(shown, 2)  # how many of the keys before each are shown
        of = lambda index: jnp.take_along_axis(*_same_batch(before, index), 2)
        return of(first) == of(stop)

    def block_ranges(self, block_q: int, block_k: int) -> BlockRanges:
        """The blocks of keys that each block of queries sees, int32 [b?, q_blocks]; of a mask nothing is asked.

        Fully masked queries, those after the end too, neither widen a range nor leave a block full. The ranges of the
        band are NumPy's, constants: XLA would compile kernels to compute them, each twice where it tunes its fusions.
        """
        xp = np if self.cu_seqlens is None else jnp
        first, stop = (_in_blocks(x, block_q, 0, xp) for x in self.intervals(xp))
        first = xp.where(first < stop, first, _round_up(self.kv_len, block_k))
        of_band = BlockRanges(
            first.min(2) // block_k, -(-stop.max(2) // block_k), -(-first.max(2) // block_k), stop.min(2) // block_k
        )
        if self.segment_ids is None:
            return of_band
        of_segments = self.segment_block_ranges(block_q, block_k)
        of_both = zip((jnp.maximum, jnp.minimum) * 2, of_band, of_segments, strict=True)
        return BlockRanges(*(within(*ranges) for within, *ranges in of_both))

    def segment_block_ranges(self, block_q: int, block_k: int) -> BlockRanges:
        """The blocks of keys in which ids of each block of queries may occur, int32 [b, q_blocks], given segment ids.

        From the first to the last block of keys whose range of ids meets that of the queries: where ids are sorted,
        blocks that share no id are left out, where they are not, some of these may lie between. Full ones are the first
        run of blocks of the one segment in which all these queries are.
        """
        shared, full = self._segment_blocks(block_q, block_k)
        number, none = jnp.arange(shared.shape[2], dtype=jnp.int32)[None, None], jnp.int32(shared.shape[2])
        begin = jnp.where(shared, number, none).min(2)
        end = jnp.where(shared, number, -1).max(2) + 1
        # The first run is the one that ends first: so no reduction waits for another, and XLA compiles one kernel.
        full_begin = jnp.where(full, number, none).min(2)
        is_next_full = jnp.pad(full[:, :, 1:], ((0, 0), (0, 0), (0, 1)))
        full_end = jnp.where(full & ~is_next_full, number + 1, none).min(2)
        return BlockRanges(begin, end, full_begin, full_end)

    def blocks(self, block_q: int, block_k: int, xp: Any = jnp) -> tuple[Any, Any]:
        """Which blocks of keys some query of a block may see, and which all see whole: bool [b?, q_blocks, k_blocks].

        `xp` as above, where there are no segment ids and no mask either. Queries after the end count as the last one.
        """
        of_rows = np if self.cu_seqlens is None else jnp  # constants, as the ranges of the band
        first, stop = (_in_blocks(x, block_q, xp=of_rows) for x in self.intervals(of_rows))
        start = xp.arange(-(-self.kv_len // block_k), dtype=xp.int32)[None, None] * block_k
        least_first = of_rows.where(first < stop, first, self.kv_len).min(2)[:, :, None]
        some = (least_first < xp.minimum(start + block_k, self.kv_len)) & (start < stop.max(2)[:, :, None])
        full = (first.max(2)[:, :, None] <= start) & (start + block_k <= stop.min(2)[:, :, None])
        if self.segment_ids is not None:
            shared, of_one = self._segment_blocks(block_q, block_k)
            some, full = some & shared, full & of_one
        if self.mask is not None:
            some, full = some & _any_in_blocks(self.mask, block_q, block_k), full & False
        return some, full

    def _segment_blocks(self, block_q: int, block_k: int) -> tuple[Array, Array]:
        """Whether the ids of two blocks may meet, and whether both are of one segment: bool [b, q_blocks, k_blocks]."""
        (q_least, q_low, q_high), (k_least, k_low, k_high) = (
            tuple(x[:, :, None] for x in _extremes(self.segment_ids[0], block_q)),
            tuple(x[:, None] for x in _extremes(self.segment_ids[1], block_k)),
        )
        of_one = (q_least == q_high) & (k_least == k_high) & (q_high == k_high) & (q_high >= 0)
        return (q_low <= k_high) & (k_low <= q_high), of_one


def visibility_of(operands: Operands, spec: FlashAttentionSpec) -> Visibility:
    """The visibility of a call of attention."""
    pair = lambda q, k: None if q is None else (q, k)
    return Visibility(
        *(operands.q.shape[1], operands.k.shape[1], *band(spec.causal, spec.window)),
        pair(operands.cu_seqlens_q, operands.cu_seqlens_k),
        pair(operands.q_segment_ids, operands.kv_segment_ids),
        operands.mask,
    )


def zero_fully_masked(visibility: Visibility, *arrays: Array | None) -> tuple[Array | None, ...]:
    """Arrays [b, q_len, heads, …] of zeros where a query sees no key; transposed, where no query sees a key.

    These entries may be padding with NaN, which a weight of 0 does not exclude from a product: 0·NaN = NaN.
    """
    return zero_where(visibility.fully_masked(), *arrays)


def zero_where(masked: Array, *arrays: Array | None) -> tuple[Array | None, ...]:
    """The same, of queries that are known: bool [b?, h?, q_len]. A shared head is zeroed where all its heads are."""

    def zeroed(x):
        b, heads, tokens = masked.shape
        of_heads = masked if heads <= x.shape[2] else masked.reshape(b, x.shape[2], -1, tokens).all(2)
        return jnp.where(of_heads.swapaxes(1, 2)[..., None], jnp.zeros((), x.dtype), x)

    return tuple(None if x is None else zeroed(x) for x in arrays)


def interval(aligned: Any, left: int | None, right: int | None, begin: Any, end: Any, xp: Any = jnp) -> tuple[Any, Any]:
    """The keys first ≤ j < stop of begin ≤ j < end with aligned − left ≤ j ≤ aligned + right; 0 and 0 for none."""
    first = xp.full_like(aligned, begin) if left is None else xp.maximum(aligned - left, begin)
    stop = xp.full_like(aligned, end) if right is None else xp.minimum(aligned + right + 1, end)
    some = first < stop
    return xp.where(some, first, 0), xp.where(some, stop, 0)


def most_keys(left: int | None, right: int | None, kv_len: int) -> int:
    """The largest number of keys that the band i' − left ≤ j ≤ i' + right allows a query."""
    return min(kv_len, left + right + 1) if None not in (left, right) else kv_len


def _extremes(ids: Array, block: int) -> tuple[Array, Array, Array]:
    """The least id of each block [b, blocks], the least that is not padding, and the greatest. Padding is negative."""
    ids = _in_blocks(ids, block, -1)
    return ids.min(2), jnp.where(ids < 0, jnp.iinfo(ids.dtype).max, ids).min(2), ids.max(2)


def _in_blocks(x: Any, block: int, padding: int | None = None, xp: Any = jnp) -> Any:
    """[b, n] → [b, blocks, block], after whose end stand the padding, or the last of x."""
    mode = {"mode": "edge"} if padding is None else {"constant_values": padding}
    blocks = -(-x.shape[1] // block)
    return xp.pad(x, ((0, 0), (0, -x.shape[1] % block)), **mode).reshape(x.shape[0], blocks, block)


def _any_in_blocks(mask: Array, block_q: int, block_k: int) -> Array:
    """[b?,h?,s?,t?] → whether a block shows anything in any head, [b?, q_blocks?, k_blocks?]."""
    some = mask.any(1)
    for axis, block in ((1, block_q), (2, block_k)):
        if some.shape[axis] > 1:
            blocks = -(-some.shape[axis] // block)
            some = jnp.pad(some, [(0, -n % block if a == axis else 0) for a, n in enumerate(some.shape)])
            some = some.reshape(*some.shape[:axis], blocks, block, *some.shape[axis + 1 :]).any(axis + 1)
    return some


def _same_batch(x: Array, index: Array) -> tuple[Array, Array]:
    """[b?, …, n] and [b?, …, m] of the same leading axes."""
    shape = jnp.broadcast_shapes(x.shape[:-1], index.shape[:-1])
    return tuple(jnp.broadcast_to(a, (*shape, a.shape[-1])) for a in (x, index))


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
