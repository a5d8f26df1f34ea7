"""Query tiles: the heads of some tokens, sorted by the key/value head that they use."""

import jax
import jax.numpy as jnp
from jax import Array

from . import rows_of_tile
from .cache import LANES


def tiles_of(q: Array, heads: int, tokens: int) -> Array:
    """[n,h,d] → [tiles, g, m, d]: row i·(h / g) + r of head g is head r of its group, of token i of the tile.

    In float32 for float16, which the matrix unit does not take.
    """
    q = q.astype(jnp.float32) if q.dtype == jnp.float16 else q
    n, group = q.shape[0], q.shape[1] // heads
    q = jnp.pad(q, ((0, -n % tokens), (0, 0), (0, 0)))
    tiles = q.reshape(-1, tokens, heads, group, q.shape[2]).swapaxes(1, 2)
    return _padded(tiles.reshape(*tiles.shape[:2], tokens * group, q.shape[2]), rows_of_tile(tokens, group))


def tokens_of(x: Array, n: int, group: int, tokens: int) -> Array:
    """[tiles, g, m, ...] → [n, h, ...]."""
    tiles, heads, _, *rest = x.shape
    x = x[:, :, : tokens * group].reshape(tiles, heads, tokens, group, *rest).swapaxes(1, 2)
    return x.reshape(tiles * tokens, heads * group, *rest)[:n]


def tile_of_sinks(sinks: Array | None, heads: int, tokens: int) -> Array | None:
    """Sinks [b?,h,x] as a tile [b?, g, m, 128]: the logsumexp of the sinks of each row's head."""
    if sinks is None:
        return None
    sink = jax.nn.logsumexp(sinks.astype(jnp.float32), axis=2)
    b, h = sink.shape
    sink = jnp.broadcast_to(sink.reshape(b, heads, 1, h // heads, 1), (b, heads, tokens, h // heads, LANES))
    return _padded(sink.reshape(b, heads, -1, LANES), rows_of_tile(tokens, h // heads))


def tiles_of_drafts(drafts: Array | None, group: int, tokens: int) -> Array | None:
    """[n,w] bool → [tiles, m, w] bfloat16, the same for all heads of a group; w is padded to whole registers."""
    if drafts is None:
        return None
    n, width = drafts.shape
    drafts = jnp.pad(drafts.astype(jnp.bfloat16), ((0, -n % tokens), (0, -width % LANES)))
    drafts = jnp.repeat(drafts, group, axis=0).reshape(-1, tokens * group, drafts.shape[1])
    return jnp.pad(drafts, ((0, 0), (0, rows_of_tile(tokens, group) - tokens * group), (0, 0)))


def _padded(x: Array, rows: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, rows - x.shape[2]), (0, 0)))
