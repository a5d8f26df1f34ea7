"""The static description of a call, and the range of blocks that the band leaves to a work tile."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.kernels._visibility import BlockRanges, most_keys, visibility_of
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands

from .head_dims import parts_of, tile_width

LOG2_E = float(np.log2(np.e))
# Logits with a scale that is an operand and less than this are 0 beside lse.
LEAST_SCALE = 2.0**-100


@dataclass(frozen=True)
class Problem:
    """The shapes and options of one call.

    Attributes:
        B, S, K, H, G, D, V: batch, queries, keys, query heads, key/value heads, and the two feature sizes.
        scale: the factor of q·kᵀ; if that is an operand (`scale_of_heads`), 1.0, and what was read of it in a kernel.
        softcap: logits become softcap·tanh(logits / softcap).
        low, high: query i sees the keys j with i + low ≤ j ≤ i + high; None where unbounded, and in packed calls.
        packed, segmented: arrays mask more than the band does, see mask_info.py.
        dtype: of q, k, v and o.
        rope: the last features of keys, if these are an array of their own, the same for all heads; 0 if they are not.
    """

    B: int
    S: int
    K: int
    H: int
    G: int
    D: int
    V: int
    scale: Array | float
    softcap: float | None
    low: int | None
    high: int | None
    packed: bool
    segmented: bool
    dtype: np.dtype
    rope: int = 0

    @property
    def D_parts(self) -> tuple[slice, ...]:
        """The parts of a tile of q or k of the forward."""
        return parts_of(self.D, by_row=self.rope > 0)

    @property
    def D_tile(self) -> int:
        """Columns of a tile of q or k."""
        return tile_width(self.D)

    @property
    def V_tile(self) -> int:
        """Columns of a tile of v or o."""
        return tile_width(self.V)

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.H // self.G

    @property
    def exponent(self) -> Array | float:
        """The factor that makes the result of `tiles.logits` into an exponent of 2."""
        return LOG2_E * (self.scale if self.softcap is None else self.softcap)

    @property
    def masked_by_arrays(self) -> bool:
        """Whether ends of sequences or segment ids mask more than the band does."""
        return self.packed or self.segmented

    @property
    def cut(self) -> bool:
        """Whether blocks other than the last may be partial ones, which need a mask."""
        return self.low is not None or self.high is not None or self.masked_by_arrays

    @property
    def most_keys(self) -> int:
        """The largest number of keys that the band allows a query."""
        return most_keys(None if self.low is None else -self.low, self.high, self.K)

    @property
    def masks_queries(self) -> bool:
        """Whether the band masks every key for the first queries, which may then hold NaN."""
        return self.high is not None and self.high < 0

    def band(self, of_keys: bool) -> tuple[int | None, int | None]:
        """(low, high) of queries, or of keys: key j is seen by the queries i with j − high ≤ i ≤ j − low."""
        if not of_keys:
            return self.low, self.high
        return None if self.high is None else -self.high, None if self.low is None else -self.low


def problem_of(operands: Operands, spec: FlashAttentionSpec, k_rope: Array | None = None) -> Problem:
    """The problem that a call poses."""
    B, S, H, D = operands.q.shape
    K, G, V = operands.k.shape[1], operands.k.shape[2], operands.v.shape[3]
    visibility = visibility_of(operands, spec)
    return Problem(
        *(B, S, K, H, G, D, V, spec.softmax_scale if operands.softmax_scale is None else 1.0, spec.softcap),
        low=visibility.low,
        high=visibility.high,
        packed=visibility.cu_seqlens is not None,
        segmented=visibility.segment_ids is not None,
        dtype=np.dtype(operands.q.dtype),
        rope=0 if k_rope is None else k_rope.shape[2],
    )


def scale_of_heads(operands: Operands, spec: FlashAttentionSpec) -> Array | None:
    """The factor of q·kᵀ of each head, [b, h], if it is an operand."""
    if operands.softmax_scale is None:
        return None
    batch, _, heads, _ = operands.q.shape
    return jnp.broadcast_to(spec.softmax_scale * operands.softmax_scale, (batch, heads))


def divisor(scale: Array) -> Array:
    """The scale, or the least one by which what the products of the backward begin with is divided."""
    return jnp.where(jnp.abs(scale) < LEAST_SCALE, LEAST_SCALE, scale)


def weights_of_sinks(sinks: Array, lse: Array) -> Array:
    """exp(sink − lse) [b, h, n, rows]; lse is +∞ in fully masked rows.

    lse includes the sinks, so a weight is at most 1. It is clamped, because logits near 10¹² round lse by a lot.
    """
    return jnp.exp(jnp.minimum(sinks[:, :, :, None] - lse[:, :, None], 0.0))


def blocks_of_band(first: Array, block: int, low: int | None, high: int | None, length: int, step: int) -> BlockRanges:
    """The blocks of `step` y's, of `length`, that x's in [first, first + block) see, where x + low ≤ y ≤ x + high."""
    blocks = -(-length // step)
    begin = full_begin = jnp.int32(0)
    end, full_end = jnp.int32(blocks), jnp.int32(length // step)
    if high is not None:
        end = lax.min(end, _whole(first + (block + high + step - 1), step))
        full_end = lax.min(full_end, _whole(first + (high + 1), step))
    if low is not None:
        begin = _whole(first + low, step)
        full_begin = _whole(first + (block - 1 + low + step - 1), step)
    return BlockRanges(begin, end, full_begin, full_end).at_least_one(blocks)


def after_first(
    block_range: BlockRanges, compute: Callable, carry: Any, problem: Problem, one_loop: bool = False
) -> Any:
    """`carry` after compute(step, carry, masked=…) of all blocks but the first; step n is the n-th from the end.

    Compile time follows the number of loops with products. Masked blocks on both sides of the full ones share one: an
    outer loop of at most two iterations runs it, and in the first one that of the full blocks. `one_loop`: full blocks
    share it, too, and `masked` is then a condition of the step instead of a bool.
    """
    masked, whole = partial(compute, masked=True), partial(compute, masked=False)
    begin_whole, end_whole, end = (
        block_range.end - bound for bound in (block_range.full_end, block_range.full_begin, block_range.begin)
    )
    if not problem.cut:
        return lax.fori_loop(jnp.maximum(begin_whole, 1), end_whole, whole, carry)
    if problem.low is None and not problem.masked_by_arrays:
        carry = lax.fori_loop(1, begin_whole, masked, carry)
        return lax.fori_loop(jnp.maximum(begin_whole, 1), end_whole, whole, carry)
    if one_loop:
        each = lambda n, carry: compute(n, carry, masked=(n < begin_whole) | (n >= end_whole))
        return lax.fori_loop(1, end, each, carry)
    after = jnp.maximum(end_whole, 1)

    def masked_then_whole(n, carry):
        first = n == 0
        carry = lax.fori_loop(jnp.where(first, 1, after), jnp.where(first, begin_whole, end), masked, carry)
        return lax.fori_loop(jnp.where(first, jnp.maximum(begin_whole, 1), end_whole), end_whole, whole, carry)

    return lax.fori_loop(0, jnp.where(after < end, 2, 1), masked_then_whole, carry)


def _whole(x: Array, step: int) -> Array:
    """⌊x / step⌋, 0 where x is negative."""
    return lax.div(lax.max(x, np.int32(0)), np.int32(step))
