"""What a device computes of its shard of a linear recurrence, and how all devices gather it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...primitives._recurrence import Operands
from ._collectives import all_gather


class Shard(NamedTuple):
    """The final state H [b,h,d,e] of a shard, and the sums of its log decays of rows [b,h,d or 1] and columns."""

    state: Array
    of_keys: Array | None
    of_values: Array | None


def decays(x: Operands, mask: Array | None) -> tuple[Array | None, Array | None]:
    """The sums of log decays, of keys [b,h,d or 1] and of values [b,h,e], over the tokens of a mask, or over all.

    They vary over devices as the state does. None where no decay of this kind is given.
    """
    dtype = np.promote_types(x.q.dtype, np.float32)

    def total(g: Array) -> Array:
        shown = g if mask is None else jnp.where(lax.expand_dims(mask, (0, *range(2, g.ndim))), g, 0)
        return shown.sum(1, dtype=dtype)

    parts = [] if x.gk is None else [total(x.gk)]
    parts += [] if x.g is None else [total(x.g)[..., None]]
    if x.g_gamma is not None:
        count = x.q.shape[1] if mask is None else mask.sum(dtype=dtype)
        like = jnp.zeros_like(x.q, dtype).sum(1)[..., :1]
        parts.append(like + (count * x.g_gamma.astype(dtype))[..., None])
    return sum(parts[1:], parts[0]) if parts else None, None if x.gv is None else total(x.gv)


def gathered_shards(shard: Shard, axis_name: Any) -> Shard:
    """The shards of all devices, [n,…], by one collective."""
    state, *sums = shard
    parts = [state.reshape(*state.shape[:2], -1), *(a for a in sums if a is not None)]
    ends = np.cumsum([a.shape[2] for a in parts])[:-1]
    gathered = all_gather(jnp.concatenate(parts, 2)[None], axis_name)
    state_of_each, *of_each = jnp.split(gathered, ends, axis=3)
    rest = iter(of_each)
    return Shard(
        state_of_each.reshape(state_of_each.shape[0], *state.shape), *(None if a is None else next(rest) for a in sums)
    )
