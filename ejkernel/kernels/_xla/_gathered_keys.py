"""The gathered keys, logits and weights of a chunk of c queries of native_sparse_attention, with m keys each."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands
from ejkernel.xla_utils.sequence_blocks import places

from ._attention import statistics_dtype


class Lists(NamedTuple):
    """For each query the start of its sequence, the number of tokens that it sees, and its blocks [c,n]."""

    first: Array
    stop: Array
    blocks: Array


class Near(NamedTuple):
    """The keys and values [c,m,·] of the blocks of c queries, 0 where not visible, and their token indices."""

    k: Array
    v: Array
    token: Array
    visible: Array


def lists_of(x: Operands, spec: NativeSparseAttentionSpec) -> Lists:
    """The lists of all queries, with −1 for blocks that are out of range or listed before."""
    place = places(x.cu_seqlens, x.q.shape[0], x.k.shape[0])
    n, blocks = x.block_indices.shape[1], x.block_indices
    ok = (blocks >= 0) & (blocks < -(-x.k.shape[0] // spec.block_size))
    earlier = jnp.asarray(np.tri(n, k=-1, dtype=bool))
    again = ((blocks[:, :, None] == blocks[:, None]) & earlier).any(-1)
    return Lists(place.first, place.stop, jnp.where(ok & ~again, blocks, -1))


def gathered(x: Operands, lists: Lists, spec: NativeSparseAttentionSpec) -> Near:
    (c, n), size = lists.blocks.shape, spec.block_size
    position = (lists.blocks[..., None] * size + jnp.arange(size, dtype=jnp.int32)).reshape(c, n * size)
    visible = (position >= 0) & (position < lists.stop[:, None])
    near = Near(x.k, x.v, jnp.where(visible, lists.first[:, None] + position, 0), visible)
    return near._replace(k=rows_of(x.k, near), v=rows_of(x.v, near))


def rows_of(x: Array, near: Near) -> Array:
    """The rows [c,m,·] of x [t,·] at the gathered tokens."""
    if x.shape[0] == 0:
        return jnp.zeros((*near.token.shape, x.shape[-1]), x.dtype)
    return jnp.where(near.visible[..., None], x.at[near.token].get(mode="promise_in_bounds"), 0)


def of_live(x: Array, near: Near) -> Array:
    """x [c,r,·] of the queries, with 0 for fully masked ones, which may hold NaN."""
    return jnp.where(near.visible.any(-1)[:, None, None], x, 0)


def logits_of(q: Array, near: Near, spec: NativeSparseAttentionSpec) -> Array:
    s = spec.softmax_scale * product("crd,cmd->crm", of_live(q, near), near.k)
    return jnp.where(near.visible[:, None], s, -jnp.inf)


def softmax_of(s: Array) -> tuple[Array, Array, Array]:
    """The largest logit m of each row, exp(s − m), and its sum."""
    m = jnp.maximum(s.max(-1, keepdims=True, initial=-np.inf), jnp.finfo(s.dtype).min)
    weights = jnp.exp(s - (m := lax.stop_gradient(m)))
    return m, weights, weights.sum(-1, keepdims=True)


def weights_of(q: Array, near: Near, spec: NativeSparseAttentionSpec) -> Array:
    """p [c,r,m]."""
    _, weights, total = softmax_of(logits_of(q, near, spec))
    return weights / not_zero(total)


def over_keys(p: Array, v: Array) -> Array:
    """Σ_m p [c,r,m] · v [c,m,e] -> [c,r,e]."""
    return product("crm,cme->cre", p.astype(v.dtype), v)


def lse_of(m: Array, total: Array) -> Array:
    return jnp.where(total == 0, -jnp.inf, m + jnp.log(not_zero(total)))


def not_zero(total: Array) -> Array:
    return jnp.where(total == 0, 1, total)


def product(axes: str, x: Array, y: Array) -> Array:
    """An einsum in the dtype of statistics; float32 in full precision on every platform."""
    return jnp.einsum(axes, x, y, precision="highest", preferred_element_type=statistics_dtype(x.dtype))
