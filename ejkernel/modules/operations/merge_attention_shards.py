"""merge_attention_shards: merges the attention of each device over its own keys into that over all keys."""

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
from ._collectives import all_gather, is_checked
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
    """Attention over all keys inside `jax.shard_map`, from the attention of each device of a mesh axis over its own.

        lse = log Σ_d exp(lse_d),   o = Σ_d exp(lse_d − lse)·o_d

    A cache that is larger than the memory of a device is sharded by tokens. In a step of decoding all devices have the
    queries, and each attends to its own keys:

        o, lse = page_attention(q, k_pages, v_pages, lens_of_this_device, block_tables, return_lse=True)
        o, lse = merge_attention_shards(o, lse, axis_name="x", heads_last=True)

    o and lse of all devices are exchanged by one all-gather, 4·(V + 1) bytes for each row and device, and merged by
    `merge_attention` in float32. Beside Auto axes of the mesh, where XLA would gather the batch for it, the exchange is
    one all-reduce of twice the bytes, or permutes if shard_map does not check which arrays vary. A device without a key
    of a sequence has lse = −∞ there. Windows are not possible, as a shard's window would count its own positions.
    Differentiable if the parts are; operations of serving are not.

    Args:
        o: [T, H, V] or [B, S, H, V], the attention over the keys of this device.
        lse: the logsumexp of its rows, as the operation returns it: [B, H, S], [H, T] or [T, H].
        sinks: [H] or [H, n] float logits that join the denominator of every row once, the same on each device; they
            must not be given to the operation too.
        axis_name: the manual mesh axis, or axes, over which the keys are sharded.
        heads_last: whether lse is [T, H] rather than [H, T]. Required if the shapes are ambiguous, as for T = H.

    Returns:
        o and lse in the shapes given; o in the dtype given, lse in float32, or float64 if it was given so. Both are
        equal on all devices.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit, or the axis does not exist; the message names the rule.

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
    """The rows of all devices [devices,…], equal on all devices.

    "invarying" tells shard_map that the result is equal on all devices; where shard_map does not check these types,
    the gradients from other devices would be missing.
    """
    rows = vary_alike({"rows": rows, "index": lax.axis_index(axis_name)})["rows"]
    return all_gather(rows[None], axis_name, to="invarying" if is_checked(axis_name) else "varying")


def _parts(rows: Array, last: bool) -> tuple[Array, Array]:
    """o and lse from rows in which lse follows o in the last axis."""
    lse = rows[..., -1]
    return rows[..., :-1], lse if last else lse.swapaxes(-1, -2)


def _of_sinks(sinks: Array, last: bool, o: Array, lse: Array) -> tuple[Array, Array]:
    """o and lse of the sinks, whose values are 0."""
    sinks = sinks_of_heads(NAME, sinks, o.shape[-2], o)[0]
    of_heads = jax.nn.logsumexp(sinks.astype(lse.dtype), axis=-1)
    return jnp.zeros_like(o), jnp.broadcast_to(of_heads if last else of_heads[:, None], lse.shape)
