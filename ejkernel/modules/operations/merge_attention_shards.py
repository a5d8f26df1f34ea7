"""merge_attention_shards: attention over keys that are sharded over devices, from that of each device over its own."""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ...types import Sinks
from .._composed import composed
from ._arguments import array, axis_size, require_dtype, vary_alike
from ._attention import sinks_of_heads
from .merge_attention import Lse, Output, heads_are_last, merge_attention

NAME = "merge_attention_shards"


@composed
def merge_attention_shards(
    o: Output,
    lse: Lse,
    sinks: Sinks | None = None,
    *,
    axis_name: str | tuple[str, ...],
    heads_last: bool | None = None,
) -> tuple[Output, Lse]:
    """Attention over all keys inside `jax.shard_map`, from what each device of a mesh axis has of its own keys.

        lse = log Σ_d exp(lse_d),   o = Σ_d exp(lse_d − lse)·o_d

    A cache that is longer than the memory of a device is sharded by tokens. In a step of decoding all devices have the
    queries, and each attends to the keys that it has:

        o, lse = page_attention(q, k_pages, v_pages, lens_of_this_device, block_tables, return_lse=True)
        o, lse = merge_attention_shards(o, lse, axis_name="x", heads_last=True)

    o and lse of all devices are exchanged by one all-gather, 4·(V + 1) bytes for each row and device, and merged by
    `merge_attention` in float32. A device without a key of a sequence has lse = −∞ there. No window: that of a shard
    would be of its own positions. Derivatives are those of the parts; operations of serving have none.

    Args:
        o: [T, H, V] or [B, S, H, V], of the keys of this device.
        lse: the logsumexp of its rows, as the operation returns it: [B, H, S], [H, T] or [T, H].
        sinks: [H] or [H, n] logits that join the denominator of every row once, the same on each device; they are not
            given to the operation.
        axis_name: the manual mesh axis, or axes, over which the keys are sharded.
        heads_last: lse is [T, H], not [H, T]. It has to be said where the shapes do not tell, as T = H.

    Returns:
        o in its shape and dtype; lse in its shape, float32 (float64 where it is). Both are the same on each device.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit, or there is no such axis; the message names the rule.

    Flash-Decoding, 2023, the blog of PyTorch; tree attention, arXiv 2408.04093.
    """
    axis_size(NAME, axis_name)
    given = dict(o=array(NAME, "o", o), lse=array(NAME, "lse", lse))
    require_dtype(NAME, np.floating, "a float type", **given)
    last = heads_are_last(NAME, heads_last, given)
    o, lse = given.values()
    dtype = np.promote_types(lse.dtype, np.float32)
    rows = lse if last else lse.swapaxes(-1, -2)
    rows = jnp.concatenate([o.astype(dtype), rows.astype(dtype)[..., None]], -1)
    parts = [_parts(x, last) for x in _of_all_devices(rows, axis_name)]
    if sinks is not None:
        parts.append(_of_sinks(sinks, last, *parts[0]))
    merged, lse = reduce(lambda a, b: merge_attention(*a, *b, heads_last=last), parts)
    return merged.astype(o.dtype), lse


def _of_all_devices(rows: Array, axis_name: Any) -> Array:
    """[devices,…], the same on each device.

    Tiled, as a new axis would leave Explicit axes of the mesh at the places before it (jax 0.11.2). "invarying" tells
    shard_map that it is the same on each; where that checks no such types, gradients of other devices would be missing.
    """
    rows, index = vary_alike({"rows": rows, "index": lax.axis_index(axis_name)}).values()
    checked = bool(jax.typeof(index).manual_axis_type.varying)
    return lax.all_gather(rows[None], axis_name, tiled=True, to="invarying" if checked else "varying")


def _parts(rows: Array, last: bool) -> tuple[Array, Array]:
    """o and lse from rows in which lse stands behind o."""
    lse = rows[..., -1]
    return rows[..., :-1], lse if last else lse.swapaxes(-1, -2)


def _of_sinks(sinks: Array, last: bool, o: Array, lse: Array) -> tuple[Array, Array]:
    """The same of sinks, which have no values."""
    sinks = sinks_of_heads(NAME, sinks, o.shape[-2], o)[0]
    of_heads = jax.nn.logsumexp(sinks.astype(lse.dtype), axis=-1)
    return jnp.zeros_like(o), jnp.broadcast_to(of_heads if last else of_heads[:, None], lse.shape)
