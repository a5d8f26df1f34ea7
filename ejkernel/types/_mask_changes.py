"""The restrictions that can be applied to a `MaskInfo`: causality, windows, chunks, token types, cache lengths."""

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..errors import shown
from .segment_masks import PADDING, Band, as_bool, within_band


def apply_causal(self, offset: Any = 0) -> Any:
    """Hides keys j > i + offset from query i; the offset is an int or integers [B], and may be traced.

    Positions are counted from the first query and the first key, whatever their segments.
    """
    return replace(_banded(self, (None, 0), offset), causal_mask_baked_in=True)


def apply_sliding_window(
    self,
    sliding_window: Any,
    *,
    offset: Any = 0,
    mode: Literal["default", "decode", "prefill"] | None = None,
    index: Any = None,
) -> Any:
    """Restricts query i to keys i + offset − left ≤ j ≤ i + offset + right; an int w is (left, right) = (w, w).

    Args:
        sliding_window: an int, which may be traced, or a pair, where None is unbounded.
        offset: an int, or integers [B].
        mode: "decode" keeps the row `index` and the left + right + 1 keys from index − left on; "prefill" keeps the
            last w keys, for a pair left + right + 1. Both store a mask of the rows and keys that they keep, and keep
            their attached positions.
        index: for "decode", the row of the query: an int or integers [B].
    """
    pair = sliding_window if isinstance(sliding_window, tuple | list) else (sliding_window, sliding_window)
    if sliding_window is None or len(pair) != 2:
        raise ValueError(f"MaskInfo: sliding_window is {shown(sliding_window)}; it must be an int or a pair")
    left, right = (int(bound) if isinstance(bound, np.integer) else bound for bound in pair)
    for bound in (left, right):
        if isinstance(bound, int) and bound < 0:
            raise ValueError(f"MaskInfo: sliding_window is {shown(sliding_window)}; it must not be negative")
    band = None if left is None else -left, right
    found = replace(_banded(self, band, offset), sliding_window_baked_in=True)
    if mode in (None, "default"):
        return found
    batch, queries, keys = _known_shape(found, "apply_sliding_window")
    left, right = (queries + keys if bound is None else bound for bound in (left, right))
    if mode == "prefill":
        width = min(keys, left + right + 1 if isinstance(sliding_window, tuple | list) else left)
        return _part_with_positions(found, jnp.zeros(batch, jnp.int32), queries, jnp.full(batch, keys - width), width)
    if mode != "decode":
        raise ValueError(f"MaskInfo: mode is {shown(mode)}; it must be default, decode or prefill")
    if index is None:
        raise ValueError("MaskInfo: apply_sliding_window with mode='decode' needs index, the row of the query")
    index, width = jnp.broadcast_to(jnp.asarray(index, jnp.int32), (batch,)), min(left + right + 1, keys)
    first = index - min(left, queries)  # below 0 for every left of at least the number of rows
    return _part_with_positions(found, index, 1, jnp.clip(first, 0, keys - width), width)


def apply_chunked(self, chunk_size: Any, offset: int = 0) -> Any:
    """Restricts query i to the keys of its own chunk, j // chunk_size = i // chunk_size, up to j = i + offset.

    The ids of the result are chunk numbers, from 1 on. The result stores a mask, since the previous segments continue
    to apply.
    """
    if isinstance(chunk_size, int | np.integer) and chunk_size < 1:
        raise ValueError(f"MaskInfo: chunk_size is {shown(chunk_size)}; it must be at least 1")
    _, queries, keys = _known_shape(self, "apply_chunked")
    mask = self._pairs() & create_chunked_attention_mask(chunk_size, queries, keys, offset)
    ids = (jnp.where(x < 0, PADDING, 1 + jnp.arange(x.shape[-1]) // chunk_size) for x in self._ids())
    q, kv = (x.astype(jnp.int32) for x in ids)
    found = self.replace(attention_mask=mask, q_segment_ids=q, kv_segment_ids=kv)
    return replace(found, chunked_mask_baked_in=True)


def create_chunked_attention_mask(
    chunk_size: Any, q_len: int, kv_len: int | None = None, offset: Any = 0, dtype: DTypeLike = jnp.bool_
) -> Any:
    """A mask [Q, K] that is 1 where j // chunk_size = i // chunk_size and j ≤ i + offset."""
    if isinstance(chunk_size, int | np.integer) and chunk_size < 1:
        raise ValueError(f"MaskInfo: chunk_size is {shown(chunk_size)}; it must be at least 1")
    rows, columns = jnp.arange(q_len), jnp.arange(q_len if kv_len is None else kv_len)
    same = rows[:, None] // chunk_size == columns[None] // chunk_size
    return (same & within_band((None, offset), rows, columns)).astype(dtype)


def apply_token_type_ids(
    self,
    token_type_ids: Any,
    *,
    combine: Literal["union", "intersect", "replace"] = "union",
    zero_policy: Literal["q", "kv", "both", "none"] = "q",
    update_segment_ids: bool | None = None,
) -> Any:
    """Combines the mask with the mask of pairs of equal type: by union or intersection, or by replacing it.

    Args:
        token_type_ids: [B, S], or a pair (q [B, Q], kv [B, K]).
        combine: "union", "intersect" or "replace".
        zero_policy: "q", "kv", "both" or "none": where type 0 means that a token has no type.
        update_segment_ids: whether the types become the segment ids, with type 0 as padding; by default unless combine
            is "union".

    The result stores a mask.
    """
    q, kv = token_type_ids if isinstance(token_type_ids, tuple | list) else (token_type_ids, token_type_ids)
    q, kv = jnp.asarray(q), jnp.asarray(kv)
    if zero_policy not in ("q", "kv", "both", "none"):
        raise ValueError(f"MaskInfo: zero_policy is {shown(zero_policy)}; it must be q, kv, both or none")
    if combine not in ("union", "intersect", "replace"):
        raise ValueError(f"MaskInfo: combine is {shown(combine)}; it must be union, intersect or replace")
    _, queries, keys = _known_shape(self, "apply_token_type_ids")
    if q.shape[-1] != queries or kv.shape[-1] != keys:
        raise ValueError(f"MaskInfo: token_type_ids have {q.shape[-1]}, {kv.shape[-1]} tokens for {queries}, {keys}")
    types = q[:, :, None] == kv[:, None, :]
    types &= (q != 0)[:, :, None] if zero_policy in ("q", "both") else True
    types = types & ((kv != 0)[:, None, :] if zero_policy in ("kv", "both") else True)
    types = types[:, None]
    mask = {
        "union": lambda: self._pairs() | types,
        "intersect": lambda: self._pairs() & types,
        "replace": lambda: types,
    }
    found = replace(self.replace(attention_mask=mask[combine]()), token_type_ids_baked_in=True)
    if update_segment_ids is None:
        update_segment_ids = combine != "union"
    if not update_segment_ids:
        return found
    ids = (jnp.where(x == 0, PADDING, x).astype(jnp.int32) for x in (q, kv))
    return found.replace(**dict(zip(("q_segment_ids", "kv_segment_ids"), ids, strict=True)))


def apply_kv_lengths(
    self, kv_lengths: Any, *, q_len: int | None = None, end_index: Any = None, sliding_window: int | None = None
) -> Any:
    """The rows of a step over a cache: the last `q_len` queries before `end_index`, with keys before `kv_lengths`.

    Args:
        kv_lengths: [B] integers: keys from this index on are hidden.
        q_len: the number of rows that are kept, from end_index − q_len on.
        end_index: [B] integers; by default kv_lengths.
        sliding_window: the number of keys to keep, those that end at kv_lengths, as in the cache of a window.

    The result holds a mask [B, H or 1, q_len, K] and the ids of the same rows and keys.
    """
    if q_len is None:
        raise ValueError("MaskInfo: apply_kv_lengths needs q_len, the number of rows that are kept")
    for name, size in (("q_len", q_len), ("sliding_window", sliding_window)):
        if size is not None and size < 0:
            raise ValueError(f"MaskInfo: {name} is {size}; it must not be negative")
    batch, queries, keys = _known_shape(self, "apply_kv_lengths")
    lengths = jnp.broadcast_to(jnp.asarray(kv_lengths, jnp.int32).reshape(-1), (batch,))
    ends = lengths if end_index is None else jnp.broadcast_to(jnp.asarray(end_index, jnp.int32).reshape(-1), (batch,))
    width = keys if sliding_window is None else min(keys, sliding_window)
    rows = jnp.clip(ends - q_len, 0, max(0, queries - q_len))
    columns = jnp.clip(lengths - width, 0, keys - width)
    return _part(self, rows, min(q_len, queries), columns, width, lengths)


def _known_shape(self, change: str) -> tuple[int, int, int]:
    if None in self.shape:
        raise ValueError(f"MaskInfo: {change} of an empty MaskInfo; it must have segment ids or an attention_mask")
    return self.shape


def _banded(self, band: tuple[Any, Any], offset: Any) -> Any:
    """Restricts a MaskInfo by a band, shifted by an offset: as numbers if these are static, otherwise in the mask."""
    _known_shape(self, "apply_causal or apply_sliding_window")
    if all(x is None for x in band):
        return self
    if all(x is None or isinstance(x, int | np.integer) for x in (*band, offset)):
        low, high = (None if x is None else int(x) + int(offset) for x in band)
        return replace(self, _band=_narrower(self._band, (low, high)))
    rows, columns = map(jnp.arange, self._pairs().shape[-2:])
    rows = rows + jnp.asarray(offset).reshape(-1, 1)  # [B or 1, Q]
    return self.replace(attention_mask=self._pairs() & within_band(band, rows, columns)[:, None])


def _narrower(a: Band, b: Band) -> Band:
    """The intersection of two bands."""
    both = lambda pick, x, y: x if y is None else y if x is None else pick(x, y)
    return both(max, a[0], b[0]), both(min, a[1], b[1])


def _part(self, rows: Any, queries: int, columns: Any, keys: int, lengths: Any = None) -> Any:
    """`queries` rows from `rows` [B] and `keys` columns from `columns` [B] on; keys from `lengths` on are hidden."""
    mask, _, _, band = self.visibility
    at, of = rows[:, None] + jnp.arange(queries), columns[:, None] + jnp.arange(keys)
    visible = within_band(band, at, of)
    if lengths is not None:
        visible = visible & (of < lengths[:, None])[:, None, :]
    ids = {}
    if self._q_segment_ids is not None:
        ids["_q_segment_ids"] = q_part = _cut(self._q_segment_ids, rows, queries)
    if self._kv_segment_ids is not None:
        kv_part = _cut(self._kv_segment_ids, columns, keys)
        valid = True if lengths is None else of < lengths[:, None]
        ids["_kv_segment_ids"] = jnp.where(valid, kv_part, PADDING)
    if mask is None:
        base = (q_part[:, :, None] == kv_part[:, None, :]) & (q_part >= 0)[:, :, None]
        mask = base[:, None]
    else:
        full = jnp.broadcast_to(mask, (rows.shape[0], *mask.shape[1:]))
        mask = _cut(_cut(full, columns, keys).swapaxes(-1, -2), rows, queries).swapaxes(-1, -2)
    mask = as_bool(mask) & (visible if isinstance(visible, bool) else visible[:, None])
    return replace(self, _attention_mask=mask, _band=(None, None), **ids)


def _part_with_positions(self, rows: Any, queries: int, columns: Any, keys: int) -> Any:
    """`_part`, and the same part of the positions that a caller attached."""
    of = lambda x, start, size: (
        None if x is None else _cut(jnp.broadcast_to(x, (*start.shape, x.shape[-1])), start, size)
    )
    positions = dict(q_positions=of(self.q_positions, rows, queries), kv_positions=of(self.kv_positions, columns, keys))
    return replace(_part(self, rows, queries, columns, keys), **positions)


def _cut(x: Any, start: Any, size: int) -> Any:
    """`size` entries of the last axis of x [B, …], from `start` [B] on."""
    return jax.vmap(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, size, -1))(x, start)
