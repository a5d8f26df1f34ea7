"""The plain formulas that the demo compares the operations with."""

import math

import jax
import jax.numpy as jnp
from jax import Array


def plain_attention(q: Array, k: Array, v: Array, *, causal: bool, window: int | None, softcap: float) -> Array:
    """softmax(softcap · tanh(q·kᵀ / (√D softcap)), masked) · v, with all logits in memory."""
    batch, length, heads, dim = q.shape
    q = q.reshape(batch, length, k.shape[2], -1, dim)
    s = jnp.einsum("bigrd,bjgd->bgrij", q, k, preferred_element_type=jnp.float32) / math.sqrt(dim)
    s = softcap * jnp.tanh(s / softcap)
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    visible = (distance >= 0) & (distance < (window or length)) if causal else jnp.ones_like(distance, bool)
    p = jax.nn.softmax(jnp.where(visible, s, -jnp.inf), -1).astype(v.dtype)
    return jnp.einsum("bgrij,bjge->bigre", p, v).reshape(batch, length, heads, dim)


def plain_gla(
    q: Array, k: Array, v: Array, gk: Array, initial_state: Array | None = None, *, return_state: bool
) -> tuple[Array, Array]:
    """h = diag(exp gk) h + k vᵀ and o = qᵀ h / √K token by token, in float32."""
    batch, _, heads, features = q.shape
    k, v = (jnp.repeat(x, heads // x.shape[2], 2) for x in (k, v))
    h = jnp.zeros((batch, heads, features, v.shape[-1])) if initial_state is None else initial_state

    def step(h, now):
        q, k, v, gk = now
        h = jnp.exp(gk)[..., None] * h + k[..., None] * v[..., None, :]
        return h, jnp.einsum("bhk,bhkv->bhv", q, h) / math.sqrt(features)

    h, o = jax.lax.scan(step, h, tuple(jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (q, k, v, gk)))
    return jnp.moveaxis(o, 0, 1).astype(q.dtype), h


def plain_grouped_matmul(lhs: Array, rhs: Array, group_sizes: Array, *, preferred_element_type) -> Array:
    """Every row times every matrix, of which the product with the matrix of the row's group is selected."""
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(len(lhs)), side="right")
    kept = jax.nn.one_hot(group, len(rhs), dtype=lhs.dtype)
    every = jnp.einsum("mk,ekn->emn", lhs, rhs, preferred_element_type=jnp.float32)
    return jnp.einsum("emn,me->mn", every, kept.astype(jnp.float32)).astype(preferred_element_type)
