"""What is computed in one tile: `block_k` keys by `block_q` queries, **keys in sublanes and queries in lanes**.

With sᵀ = k·qᵀ the statistics of a query (maximum, denominator, lse, delta) are lane vectors: they are reduced over
sublanes by plain vector arithmetic and broadcast back for nothing, where the other orientation needs a shuffle across
lanes for every row. Logits are in base two (times log2 e), since that is what the hardware exponentiates.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from .problem import LOG2_E, Problem, Tile
from .schedule import PARTIAL, SKIPPED

# A masked logit: its exponential is 0 beside any real one, and unlike −inf it has differences.
MASKED = -0.7 * float(np.finfo(np.float32).max)


def contract(x, y, axes: tuple[int, int]) -> jax.Array:
    """Matrix product over one axis of each, accumulated in float32; float32 operands are multiplied as float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def column(row) -> jax.Array:
    """[1,n] in lanes → [n,1] in sublanes."""
    return row[...].T


def scalar(ref, b, h) -> jax.Array:
    """The element of batch b and head h of [b?,h?]."""
    return ref[b if ref.shape[0] > 1 else 0, h if ref.shape[1] > 1 else 0]


def scale_of(tile: Tile, problem: Problem, b, h):
    """The factor of q·kᵀ: the static scale, times the operand's where given."""
    static = problem.spec.softmax_scale
    return static if tile.scale is None else static * scalar(tile.scale, b, h)


def for_kind(kind, kinds: tuple[int, ...], tile: Tile, j, compute: Callable) -> None:
    """Runs `compute(visible)` as the tile's kind asks: with a mask, with None for one, or not at all."""
    for candidate in kinds:
        if candidate != SKIPPED:
            pl.when(kind == candidate)(
                lambda masked=candidate == PARTIAL: compute(visible(tile, j) if masked else None)
            )


def visible(tile: Tile, j) -> jax.Array:
    """Which query sees which key, bool [block_k, block_q]: its interval, cut down by mask and segments."""
    block_k, block_q = tile.k.shape[0], tile.q.shape[0]
    key = j * block_k + jax.lax.broadcasted_iota(jnp.int32, (block_k, block_q), 0)
    conditions = [key >= 0]
    if tile.first is not None:
        conditions.append(key >= tile.first[...])
    if tile.last is not None:
        conditions.append(key <= tile.last[...])
    if tile.mask is not None:
        conditions.append(tile.mask[...].astype(jnp.int32) != 0)
    if tile.key_mask is not None:
        conditions.append(column(tile.key_mask) != 0)
    if tile.q_segments is not None:
        conditions.append(column(tile.k_segments) == tile.q_segments[...])
    seen = conditions[0]
    for condition in conditions[1:]:
        seen = seen & condition
    return seen


def load_keys(tile: Tile, problem: Problem, visible) -> tuple[jax.Array, jax.Array]:
    """k and v, with zeros for keys that no query of the tile sees where such keys may hold anything."""
    return tuple(only_seen(x, problem, visible) for x in (tile.k[...], tile.v[...]))


def only_seen(rows: jax.Array, problem: Problem, visible) -> jax.Array:
    if visible is None or not problem.hidden_keys:
        return rows
    seen = jnp.max(visible.astype(jnp.float32), axis=1, keepdims=True) > 0
    return jnp.where(seen, rows.astype(jnp.float32), 0).astype(rows.dtype)


def logits_of(tile: Tile, problem: Problem, qk: jax.Array, scale, visible) -> tuple[jax.Array, jax.Array | None]:
    """The logits in base two from q·kᵀ, and their slope in the uncapped ones (None for 1):

    x = scale·q·kᵀ + bias;  without softcap: x;  with: softcap·tanh(x / softcap), slope 1 − tanh²
    """
    softcap = problem.spec.softcap
    unit = LOG2_E if softcap is None else 1 / softcap
    x = qk * (scale * unit)
    if tile.bias is not None:
        x = x + tile.bias[...].astype(jnp.float32) * unit
    if tile.key_bias is not None:
        x = x + column(tile.key_bias).astype(jnp.float32) * unit
    slope = None
    if softcap is not None:
        t = jnp.tanh(x)
        x, slope = t * (softcap * LOG2_E), 1 - t * t
    return (x if visible is None else jnp.where(visible, x, MASKED)), slope


def gradients_of(tile: Tile, problem: Problem, k, v, scale, visible) -> tuple[jax.Array, jax.Array]:
    """The weights p and the gradient ds of the uncapped logits:

    p = exp(s − lse);  dp = v·doᵀ;  ds = p·(dp − delta)·slope with delta = Σ do·o − dlse
    """
    x, slope = logits_of(tile, problem, contract(k, tile.q[...], (1, 1)), scale, visible)
    p = jnp.exp2(x - tile.lse[...])
    ds = p * (contract(v, tile.do[...], (1, 1)) - tile.delta[...])
    return p, ds if slope is None else ds * slope
