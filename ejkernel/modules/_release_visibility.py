"""The visibility of a call in the form of ejkernel 0.0.78, combined from `mask_info`, `causal` and `sliding_window`.

There, causality and windows of dense operations count queries and keys from the first of each (top-left), and a window
of an int w is (w, w). `ejkernel.lax` counts from the last of each, i' = i + K − S. What is a band here,
i + low ≤ j ≤ i + high, is one there: with shift = K − S, left = shift − low and right = high − shift.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..errors import shown, type_error, value_error
from ..types import MaskInfo
from ..types.mask_info import Visibility
from ..types.segment_masks import Band, equal_and_valid, within_band


def visibility_of(operation: str, call: Mapping[str, Any], batch: int, queries: int, keys: int) -> Visibility:
    """The visibility of `mask_info`, cut to the first queries and keys, with the causality and window of the call.

    If mask_info already includes causality or a window, the call adds none.
    """
    info = given_mask_info(operation, call) or MaskInfo()
    mask, q_ids, kv_ids, band = info.visibility
    if mask is not None:
        mask = mask[:, :, :queries, :keys]
    if q_ids is not None:
        of_all = lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])) if x.shape[0] == 1 else x
        q_ids, kv_ids = of_all(q_ids[:, :queries]), of_all(kv_ids[:, :keys])
    if call["causal"] and not info.causal_mask_baked_in:
        band = _narrower(band, (None, 0))
    if call["sliding_window"] is not None and not info.sliding_window_baked_in:
        left, right = window_of(operation, call["sliding_window"])
        band = _narrower(band, (None if left is None else -left, right))
    return Visibility(mask, q_ids, kv_ids, band)


def given_mask_info(operation: str, call: Mapping[str, Any]) -> MaskInfo | None:
    """The `mask_info` of a call; raises if it is something else."""
    info = call["mask_info"]
    if not isinstance(info, MaskInfo | None):
        raise type_error(operation, f"mask_info is {shown(info)}; it must be a MaskInfo or None")
    return info


def window_of(operation: str, window: Any) -> tuple[int | None, int | None]:
    """(left, right) of a window: an int w is (w, w); negative bounds are none."""
    pair = window if isinstance(window, tuple | list) else (window, window)
    if len(pair) != 2 or not all(x is None or isinstance(x, int | np.integer) for x in pair):
        raise value_error(operation, f"sliding_window is {shown(window)}; it must be an int or a pair (left, right)")
    return tuple(None if x is None or x < 0 else int(x) for x in pair)


def _narrower(a: Band, b: Band) -> Band:
    both = lambda pick, x, y: x if y is None else y if x is None else pick(x, y)
    return both(max, a[0], b[0]), both(min, a[1], b[1])


def dense(seen_by: Visibility, queries: int, keys: int) -> Any:
    """The mask, broadcastable to [B, H, Q, K]; True if nothing is hidden."""
    mask, q_ids, kv_ids, band = seen_by
    mask = True if mask is None else mask
    if q_ids is not None:
        mask = mask & equal_and_valid(q_ids, kv_ids)[:, None]
    return mask & within_band(band, jnp.arange(queries), jnp.arange(keys))


def lax_band(seen_by: Visibility, queries: int, keys: int) -> tuple[dict[str, Any], int, Visibility]:
    """`causal` and `sliding_window` of lax for a band, how many keys are left, and the visibility that they leave.

    Keys that are after the band of the last query are seen by no query: without them the last key is that of the last
    query, which is what lax aligns. A band that has no such form, its low end beyond the diagonal, becomes a mask.
    """
    mask, q_ids, kv_ids, (low, high) = seen_by
    if high is not None and 0 < queries + high < keys:
        keys = queries + high
        mask = mask if mask is None else mask[..., :keys]
        kv_ids = kv_ids if kv_ids is None else kv_ids[:, :keys]
    shift = keys - queries
    left, right = (None if low is None else shift - low), (None if high is None else high - shift)
    if (left is not None and left < 0) or (right is not None and right < 0):
        band = within_band((low, high), jnp.arange(queries), jnp.arange(keys))[None, None]
        return {}, keys, Visibility(band if mask is None else mask & band, q_ids, kv_ids, (None, None))
    options = {"causal": right == 0}
    if left is not None or right:
        options["sliding_window"] = (left, right)
    return options, keys, Visibility(mask, q_ids, kv_ids, (None, None))


def specs_of_masks(
    seen_by: Visibility, batch: Any, heads: Any, rows: Any = None, columns: Any = None
) -> dict[str, PartitionSpec]:
    """The PartitionSpecs of a mask and of ids, from the entries of the axes of queries and keys."""
    mask, q_ids, _, _ = seen_by
    specs = {}
    if mask is not None:
        entries = (batch, heads, rows, None)
        specs["mask"] = PartitionSpec(*(e if size > 1 else None for e, size in zip(entries, mask.shape, strict=True)))
    if q_ids is not None:
        specs |= dict(q_segment_ids=PartitionSpec(batch, rows), kv_segment_ids=PartitionSpec(batch, columns))
    return specs
