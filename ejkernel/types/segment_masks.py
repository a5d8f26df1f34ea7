"""Conversions between segment ids [batch, length] and masks [batch, heads, q, kv]."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Integer, Num, Shaped

PADDING = -1

Band: TypeAlias = tuple[int | None, int | None]


def segment_ids_to_mask(
    segment_ids: Integer[Array, "batch q"] | tuple[Integer[Array, "batch q"], Integer[Array, "batch k"]],
    dtype: DTypeLike = jnp.bool_,
    return_separate_masks: bool = False,
) -> Num[Array, "batch 1 q k"] | Bool[Array, "batch 1 q k"] | tuple[Shaped[Array, "..."], ...]:
    """The mask [B, 1, Q, K] of segment ids: 1 where both are equal and none is negative.

    Args:
        segment_ids: [B, S] for self-attention, or a pair (q [B, Q], kv [B, K]).
        dtype: the dtype of the mask.
        return_separate_masks: return (q [B, Q], kv [B, K], mask); the first two are 1 for tokens that are not padding.
    """
    q, kv = segment_ids if isinstance(segment_ids, tuple | list) else (segment_ids, segment_ids)
    separate = segment_ids_to_qkv_masks(q, kv, dtype)
    return separate if return_separate_masks else separate[2]


def segment_ids_to_qkv_masks(
    q_segment_ids: Integer[Array, "batch q"],
    kv_segment_ids: Integer[Array, "batch k"] | None = None,
    dtype: DTypeLike = jnp.bool_,
) -> tuple[Shaped[Array, "batch q"], Shaped[Array, "batch k"], Shaped[Array, "batch 1 q k"]]:
    """(q [B, Q], kv [B, K], mask [B, 1, Q, K]) of segment ids; those of keys are those of queries if left out."""
    q, kv = jnp.asarray(q_segment_ids), jnp.asarray(q_segment_ids if kv_segment_ids is None else kv_segment_ids)
    return (q >= 0).astype(dtype), (kv >= 0).astype(dtype), equal_and_valid(q, kv)[:, None].astype(dtype)


def equal_and_valid(q: Integer[Array, "*batch q"], kv: Integer[Array, "*batch k"]) -> Bool[Array, "*batch q k"]:
    """Where the ids of a query and of a key are equal and not negative."""
    return (q[..., :, None] == kv[..., None, :]) & (q[..., :, None] >= 0)


def mask_to_segment_ids(
    mask: Shaped[Array, "..."], per_head: bool = False
) -> tuple[Integer[Array, "..."], Integer[Array, "..."]]:
    """Segment ids of a mask: queries with equal rows, and keys with equal columns, get equal ids, in order from 0.

    Queries and keys whose row or column is all False get −1. Ids of queries and of keys are numbered separately, so
    that they give the same mask back only if it consists of blocks.

    Args:
        mask: [Q, K], [B, Q, K] or [B, H, Q, K].
        per_head: for a mask of four axes, ids [B, H, Q] and [B, H, K] of each head; otherwise rows and columns are
            equal if they are in all heads.
    """
    mask = as_bool(mask)
    if mask.ndim not in (2, 3, 4):
        raise ValueError(f"mask_to_segment_ids: mask has {mask.ndim} axes; it must have 2 to 4")
    of_queries, of_keys = mask, mask.swapaxes(-1, -2)
    if mask.ndim == 4 and not per_head:
        batch, heads, queries, keys = mask.shape
        of_queries = mask.transpose(0, 2, 1, 3).reshape(batch, queries, heads * keys)
        of_keys = mask.transpose(0, 3, 1, 2).reshape(batch, keys, heads * queries)
    return _numbers_of_rows(of_queries), _numbers_of_rows(of_keys)


def _numbers_of_rows(rows):
    """[…, n] for rows […, n, m]: equal rows have one number, in the order of first occurrence; −1 if all is False."""
    counts = jnp.einsum("...im,...jm->...ij", rows.astype(jnp.float32), rows.astype(jnp.float32))
    sizes = jnp.diagonal(counts, axis1=-2, axis2=-1)
    equal = (counts == sizes[..., :, None]) & (counts == sizes[..., None, :])
    first, valid = jnp.argmax(equal, -1), sizes > 0
    opens = valid & (first == jnp.arange(rows.shape[-2]))
    numbers = jnp.cumsum(opens, -1, dtype=jnp.int32) - 1
    return jnp.where(valid, jnp.take_along_axis(numbers, first, -1), PADDING)


def padding_ids(mask: Bool[Array, "batch heads q k"]) -> tuple[Integer[Array, "batch q"], Integer[Array, "batch k"]]:
    """0 for queries that see some key, and keys that some query sees, in any head; −1 for the others."""
    number = lambda valid: jnp.where(valid, 0, PADDING).astype(jnp.int32)
    return number(mask.any((1, 3))), number(mask.any((1, 2)))


def positions_in_segments(ids: Integer[Array, "batch length"], padding: int) -> Integer[Array, "batch length"]:
    """Positions that begin at 0 wherever the id changes; `padding` where it is negative."""
    at = jnp.broadcast_to(jnp.arange(ids.shape[-1], dtype=jnp.int32), ids.shape)
    begins = jnp.concatenate([jnp.ones_like(ids[..., :1], bool), ids[..., 1:] != ids[..., :-1]], -1)
    start = jax.lax.cummax(jnp.where(begins, at, 0), axis=ids.ndim - 1)
    return jnp.where(ids < 0, padding, at - start)


def as_bool(mask: Shaped[Array, "..."]) -> Bool[Array, "..."]:
    """True where a mask of any dtype is not 0."""
    mask = jnp.asarray(mask)
    return mask if mask.dtype == jnp.bool_ else mask != 0


def within_band(band: tuple[Any, Any], rows: Integer[Array, "*#batch q"], columns: Integer[Array, "*#batch k"]) -> Any:
    """low ≤ j − i ≤ high for rows i and columns j; None is unbounded, and True is returned if both are None.

    A bound may be any int, also one that does not fit in 32 bits.
    """
    low, high = map(_within_int32, band)
    distance = columns[..., None, :] - rows[..., :, None]
    after = True if low is None else distance >= low
    return after if high is None else after & (distance <= high)


def _within_int32(bound: Any) -> Any:
    """A static bound as an int32 that the same distances satisfy; None and arrays are unchanged."""
    if not isinstance(bound, int | np.integer):
        return bound
    limits = np.iinfo(np.int32)
    return np.int32(min(max(int(bound), limits.min), limits.max))
