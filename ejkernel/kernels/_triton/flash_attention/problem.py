"""The compile-time constants of the kernels of flash_attention, and operands prepared for them."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import triton

from ejkernel.kernels._visibility import visibility_of, zero_fully_masked
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands


@dataclass(frozen=True)
class Strides:
    """The strides of an array with axes (b, h, s, t), (b, h) or (b,) and perhaps more; 0 where it is broadcast."""

    b: int
    h: int = 0
    s: int = 0
    t: int = 0


@dataclass(frozen=True)
class Problem:
    """The shapes and options of one call, as a compile-time constant.

    Attributes:
        B, S, K, H, G, D, V: batch, queries, keys, query heads, key/value heads, and the two feature sizes.
        N: sequences in a packed call, None in a dense one.
        scale: the static factor of q·kᵀ.
        softcap: logits become softcap·tanh(logits / softcap).
        left, right: the band i' − left ≤ j ≤ i' + right; None where unbounded. Causal is right = 0.
        dropout_rate: the share of weights dropped.
        sinks: how many there are per head.
        bias_strides, …: of the optional operands; None for those that are absent.
        exact: q, k and v are float32.
        segmented: queries and keys have segment ids.
        masks_queries, masks_keys: band or sequences may fully mask a query, or a key. Their contents may be NaN, and
            must not be multiplied even by zero.
        split: lse and o of tangent and backward are those of more keys than these.
    """

    B: int
    S: int
    K: int
    H: int
    G: int
    D: int
    V: int
    N: int | None
    scale: float
    softcap: float | None
    left: int | None
    right: int | None
    dropout_rate: float
    bias_strides: Strides | None
    mask_strides: Strides | None
    sinks: int
    sinks_strides: Strides | None
    scale_strides: Strides | None
    cu_q_strides: Strides | None
    cu_k_strides: Strides | None
    exact: bool
    segmented: bool
    masks_queries: bool
    masks_keys: bool
    split: bool

    @property
    def corrected(self) -> bool:
        """Whether weights are divided by the sum of their row, which a split does not know."""
        return self.exact and not self.split

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.H // self.G

    @property
    def N_PAD(self) -> int:
        """The least power of two ≥ N + 2: tokens after the last and before the first sequence count as two more."""
        return triton.next_power_of_2(self.N + 2)

    @property
    def SINKS_PAD(self) -> int:
        return triton.next_power_of_2(self.sinks)

    @property
    def folded(self) -> bool:
        """Whether the scale is folded into the exponent, as logits are q·kᵀ times a positive constant.

        Not in float32, where subtracting before multiplying keeps the last bits of large logits.
        """
        plain = self.softcap is None and self.bias_strides is None and self.scale_strides is None
        return plain and self.scale > 0 and not self.exact

    @property
    def unit(self) -> float:
        """The factor from results of `logits.capped` to logits."""
        return self.scale if self.folded else 1.0

    @property
    def factor_of_large_logits(self) -> float:
        """The least power of two ≥ scale·log₂e, at most 2¹²⁷: see `logits.weights_of_maximum`."""
        return 2.0 ** min(127, math.ceil(math.log2(self.scale * math.log2(math.e))))

    @property
    def caps_far(self) -> bool:
        """Whether the cap is so large that most logits are small beside it, and tanh needs its series.

        A tanh with an absolute error of 6e-8 would lose their last bits.
        """
        return self.softcap is not None and self.softcap > 100

    @property
    def keep_from(self) -> int:
        """The least random word for which dropout keeps a weight."""
        return min(round(self.dropout_rate * 2**32), 2**32 - 1)

    @property
    def keep_scale(self) -> float:
        return 1 / (1 - self.dropout_rate)

    def blocks(self, block: int, of_keys: bool = False) -> int:
        """How many blocks of queries (or keys) one head is cut into.

        In a packed call every sequence may end in a partial block, as may the tokens after the last sequence and those
        before the first.
        """
        tokens = self.K if of_keys else self.S
        return triton.cdiv(tokens, block) if self.N is None else tokens // block + self.N + 2

    def edges(self, block: int) -> bool:
        """Whether a loop over blocks of keys may contain tiles that are partly masked, by more than mask or bias."""
        return self.segmented or self.left is not None or self.right is not None or self._uneven(block, True)

    def checked(self, block: int, over_keys: bool) -> bool:
        """Whether a loop over blocks of keys (or queries) may contain tokens that must not be loaded."""
        return self._uneven(block, over_keys) or (self.masks_keys if over_keys else self.masks_queries)

    def _uneven(self, block: int, over_keys: bool) -> bool:
        return self.N is not None or (self.K if over_keys else self.S) % block != 0


def problem_of(operands: Operands, spec: FlashAttentionSpec) -> Problem:
    """The `Problem` of a call."""
    B, S, H, D = operands.q.shape
    K, G, V = operands.k.shape[1], operands.k.shape[2], operands.v.shape[3]
    visibility = visibility_of(operands, spec)
    return Problem(
        *(B, S, K, H, G, D, V),
        N=None if operands.cu_seqlens_q is None else operands.cu_seqlens_q.shape[1] - 1,
        scale=spec.softmax_scale,
        softcap=spec.softcap,
        left=visibility.left,
        right=visibility.right,
        dropout_rate=spec.dropout_rate,
        bias_strides=broadcast_strides(operands.bias),
        mask_strides=broadcast_strides(operands.mask),
        sinks=0 if operands.sinks is None else operands.sinks.shape[2],
        sinks_strides=broadcast_strides(operands.sinks),
        scale_strides=broadcast_strides(operands.softmax_scale),
        cu_q_strides=broadcast_strides(operands.cu_seqlens_q),
        cu_k_strides=broadcast_strides(operands.cu_seqlens_k),
        exact=operands.q.dtype == jnp.float32,
        segmented=operands.q_segment_ids is not None,
        masks_queries=visibility.masks_queries,
        masks_keys=visibility.masks_keys,
        split=spec.split,
    )


def is_key_mask(operands: Operands) -> bool:
    """Whether the mask is the same for all queries and heads, as a mask of padding is."""
    mask = operands.mask
    return mask is not None and mask.shape[1] == mask.shape[2] == 1 and operands.cu_seqlens_q is None


def keys_as_segments(operands: Operands) -> Operands:
    """The operands with a mask over keys as segment ids: kernels then skip hidden blocks and do not mask full ones."""
    if not is_key_mask(operands):
        return operands
    q_ids, kv_ids = operands.q_segment_ids, operands.kv_segment_ids
    if q_ids is None:
        q_ids, kv_ids = (jnp.zeros(x.shape[:2], jnp.int32) for x in (operands.q, operands.k))
    kv_ids = jnp.where(operands.mask[:, 0, 0], kv_ids, -1)
    return operands._replace(mask=None, q_segment_ids=q_ids, kv_segment_ids=kv_ids)


def segment_ranges_of(operands: Operands, block_q: int, block_k: int, of_keys: bool = False):
    """The range of keys that share a segment with each block of queries; with `of_keys`, of queries for blocks of keys.

    int32 [B, blocks, 4], (begin, end, full_begin, full_end) in tokens: within the full range all pairs share a segment.
    None without segments.
    """
    if operands.q_segment_ids is None:
        return None
    visibility = visibility_of(operands, FlashAttentionSpec())
    if of_keys:
        return jnp.stack(visibility.transposed().segment_block_ranges(block_k, block_q), -1) * block_q
    return jnp.stack(visibility.segment_block_ranges(block_q, block_k), -1) * block_k


def zero_hidden_keys(operands: Operands, spec: FlashAttentionSpec, *arrays):
    """Arrays [B, K, G, ·] or None, zero where a mask or segment ids hide a key from every query.

    This is cheaper outside of a kernel, where every tile would have to pass through registers. Keys that the band or
    the lengths of sequences hide are never read: see `Problem.checked`.
    """
    if operands.mask is None and operands.q_segment_ids is None:
        return arrays
    return zero_fully_masked(visibility_of(operands, spec).transposed(), *arrays)


def zero_fully_masked_queries(operands: Operands, spec: FlashAttentionSpec, *arrays):
    """Arrays [B, S, H, ·], zero in queries that a mask or segment ids fully mask."""
    if operands.mask is None and operands.q_segment_ids is None:
        return arrays
    return zero_fully_masked(visibility_of(operands, spec), *arrays)


def broadcast_strides(x) -> Strides | None:
    """The strides of a dense array, 0 along axes of size 1."""
    if x is None:
        return None
    steps = [math.prod(x.shape[axis + 1 :]) for axis in range(x.ndim)]
    return Strides(*(step if size > 1 else 0 for step, size in zip(steps, x.shape, strict=True)))


# Features per matrix product in float32; partial products are then added. Rounding errors and registers both grow with
# the length of a sum.
FLOAT32_PART = 32


@triton.constexpr_function
def parts(size: int, exact: bool) -> tuple[tuple[int, int], ...]:
    """The tiles that hold `size` features, as (first feature, width): two if together they are narrower than one.

    In float32 (`exact`) each is at most `FLOAT32_PART` wide.
    """
    if exact:
        return tuple((n, min(FLOAT32_PART, padded(size - n))) for n in range(0, size, FLOAT32_PART))
    first = 1 << (size.bit_length() - 1)
    whole, rest = padded(size), size - first
    if first < 16 or rest == 0 or first + padded(rest) == whole:
        return ((0, whole),)
    return (0, first), (first, padded(rest))


def tiled(size: int) -> int:
    """The features that tiles of `size` features can hold."""
    return sum(width for _, width in parts(size, False))


@triton.constexpr_function
def padded(size: int) -> int:
    """The least power of two that holds `size` features and that a matrix unit takes."""
    return max(16, triton.next_power_of_2(size))


# The largest exponent s − lse of a weight that is divided by the sum of its row: above it, sums may overflow.
LARGEST_EXPONENT = 30.0


def weights_of_sinks(sinks, lse, corrected: bool):
    """exp(sink − lse) [B?, H, S, n], kept finite as in `logits.weights_of_lse`."""
    return jnp.exp(jnp.minimum(sinks[:, :, None, :] - lse[..., None], LARGEST_EXPONENT if corrected else 0.0))


def seen_lse(lse):
    """lse with +∞ for fully masked rows, so that exp(s − lse) is 0 there rather than NaN."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse)
