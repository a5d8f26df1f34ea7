"""The common parts of the serving operations in plain JAX: attention over a paged or dense cache.

Apart from drafts, a query sees the keys at positions first ≤ j < stop of its sequence:

    s_j = softcap·tanh(softmax_scale · q·k_j / softcap)        lse = log(Σ_j exp s_j + Σ exp sinks)
    o = Σ_j exp(s_j − lse) v_j

Slots that it does not see may hold NaN: they are masked in s and zeroed in v. The decomposition loops over blocks of
keys for a block of queries, for each query from its own first key on, and gathers only these keys.

    t queries · h query heads, r = h / g for each of g key/value heads · l keys · d, e features of keys, of values
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.export import is_symbolic_dim

from ejkernel.primitives._pages import CacheSpec

from .._places import Places, places
from .._visibility import interval
from ._attention import statistics_dtype


class Queries(NamedTuple):
    """Queries [t,h,d], and the keys that each of them sees.

    Attributes:
        q: [t,h,d].
        sequence: [t] int32, the sequence whose keys a query sees.
        first, stop: [t] int32, the range first ≤ j < stop of positions that it sees.
        valid: [t] bool, whether it belongs to a sequence; otherwise o is 0 and lse −∞.
        cached: [t] int32, the position from which on `draft` decides which keys it sees.
        draft: [t,w] bool, or None without drafts.
        sinks: [t,h,x], or None without sinks.
    """

    q: Array
    sequence: Array
    first: Array
    stop: Array
    valid: Array
    cached: Array | None = None
    draft: Array | None = None
    sinks: Array | None = None


class Softmax(NamedTuple):
    """A running softmax: maxima m, sums l of exponentials relative to m [t,g,r], and o·l [t,g,r,e]."""

    m: Array
    l: Array
    o: Array


Fetch = Callable[[Array, Array], tuple[Array, Array]]
"""(sequence [t], position [t,l]) → keys [t,l,g,d] and values [t,l,g,e] in the dtype that is computed with.

Positions are l consecutive ones, the first a multiple of l; keys at positions that a sequence lacks are undefined."""


def over_batch(step: Callable[[Any], Any], x: Any, one_by_one: bool = False) -> Any:
    """The step for each batch index of operands [b or 1,…]; a batch of one, as in calls without `vmap`, needs no loop.

    With `one_by_one` each index is computed as if it were alone.
    """
    leaves, structure = jax.tree.flatten(x)
    batch = max(a.shape[0] for a in leaves)
    moving = [a for a in leaves if a.shape[0] == batch]

    def of(moving):
        rest = iter(moving)
        return step(structure.unflatten([next(rest) if a.shape[0] == batch else a[0] for a in leaves]))

    if batch == 1:
        return jax.tree.map(lambda a: a[None], of([a[0] for a in moving]))
    return lax.map(of, moving) if one_by_one else jax.vmap(of)(moving)


def seen_until(position: Array, stop: Array, spec: CacheSpec) -> tuple[Array, Array]:
    """The range first ≤ j < stop of keys that a query at a position sees within the window; empty for a `stop` of 0."""
    return interval(position, spec.left, None, 0, stop)


def sinks_of(sinks: Array | None, tokens: int) -> Array | None:
    """Sinks as [t,h,x], from [h,x] shared by all queries, or [t,h,x]."""
    return None if sinks is None else jnp.broadcast_to(sinks, (tokens, *sinks.shape[-2:]))


# --- Common parts of the formula and its decomposition ----------------------------------------------------------------


def softmax_of(x: Queries, position: Array, k: Array, v: Array, spec: CacheSpec) -> Softmax:
    """The softmax over keys [t,l,g,d] at positions [t,l], with values [t,l,g,e].

    Keys and values without their first axis are shared by all queries.
    """
    is_visible, (tokens, heads, features), groups = visible(x, position), x.q.shape, k.shape[-2]
    t, is_visible_to_any = ("t", is_visible) if k.ndim == 4 else ("", is_visible.any(0))
    dtype, zero = statistics_dtype(x.q.dtype), np.zeros((), k.dtype)
    q = x.q.astype(k.dtype).reshape(tokens, groups, heads // groups, features)
    s = jnp.einsum(f"tgrd,{t}lgd->tgrl", q, k, precision="highest", preferred_element_type=dtype)
    s = s * np.array(spec.softmax_scale, dtype)
    if spec.softcap is not None:
        softcap = np.array(spec.softcap, dtype)
        s = softcap * jnp.tanh(s / softcap)
    s = jnp.where(is_visible[:, None, None], s, np.array(-np.inf, dtype))
    m = s.max(-1)
    p = jnp.exp(s - _finite(m)[..., None])
    v = jnp.where(is_visible_to_any[..., None, None], v, zero)
    o = jnp.einsum(f"tgrl,{t}lge->tgre", p.astype(v.dtype), v, precision="highest", preferred_element_type=dtype)
    return Softmax(m, p.sum(-1), o)


def results(total: Softmax, x: Queries) -> tuple[Array, Array]:
    """o [t,h,e] and lse [t,h], with the sinks; 0 and −∞ for queries of no sequence."""
    (tokens, heads, _), dtype = x.q.shape, total.m.dtype
    if x.sinks is not None:
        sinks = x.sinks.astype(dtype).reshape(*total.m.shape, x.sinks.shape[2])
        m = sinks.max(-1)
        l = jnp.exp(sinks - _finite(m)[..., None]).sum(-1)
        total = _merged(total, Softmax(m, l, jnp.zeros_like(total.o)))
    m, l, o = total
    lse = jnp.where(x.valid[:, None, None], _finite(m) + jnp.log(l), np.array(-np.inf, dtype))
    o = o / jnp.where(l == 0, jnp.ones((), dtype), l)[..., None]
    return o.astype(x.q.dtype).reshape(tokens, heads, o.shape[-1]), lse.reshape(tokens, heads)


def formula(x: Queries, fetch: Fetch, length: int, spec: CacheSpec) -> tuple[Array, Array]:
    """o and lse from the logits of every query and of all `length` positions that a sequence can have."""
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (x.q.shape[0], length))
    return results(softmax_of(x, position, *fetch(x.sequence, position), spec), x)


def visible(x: Queries, position: Array) -> Array:
    """Whether queries see the keys at positions [t,l], bool [t,l]."""
    inside = (x.first[:, None] <= position) & (position < x.stop[:, None])
    if x.draft is None:
        return inside
    new = position - x.cached[:, None]
    told = jnp.take_along_axis(x.draft, jnp.clip(new, 0, x.draft.shape[1] - 1), 1)
    return inside & ((new < 0) | (told & (new < x.draft.shape[1])))


def _merged(a: Softmax, b: Softmax) -> Softmax:
    """The softmax over the keys of both."""
    m = jnp.maximum(a.m, b.m)
    of_a, of_b = (jnp.exp(x.m - _finite(m)) for x in (a, b))
    return Softmax(m, a.l * of_a + b.l * of_b, a.o * of_a[..., None] + b.o * of_b[..., None])


def _finite(m: Array) -> Array:
    """The maxima, with 0 where no key is visible, so that exp(s − m) is 0 there."""
    return jnp.where(jnp.isfinite(m), m, jnp.zeros((), m.dtype))


# --- The decomposition ------------------------------------------------------------------------------------------------


def attend(x: Queries, fetch: Fetch, keys: int, queries: int, spec: CacheSpec) -> tuple[Array, Array]:
    """o and lse, computed for `queries` queries and `keys` keys of each at a time."""
    of_block = lambda x: results(_over_splits(x, fetch, keys, spec), x)
    tokens = x.q.shape[0]
    if is_symbolic_dim(tokens):
        return of_block(x)
    block = queries if spec.batch_invariant else min(queries, max(1, tokens))
    blocks = -(-tokens // block)
    padded = lambda a: jnp.pad(a, [(0, blocks * block - tokens), *[(0, 0)] * (a.ndim - 1)])
    cut = lambda a: padded(a).reshape(blocks, block, *a.shape[1:])
    join = lambda a: a.reshape(blocks * block, *a.shape[2:])[:tokens]
    alike = _between_barriers(of_block) if spec.batch_invariant else of_block
    return jax.tree.map(join, lax.map(alike, jax.tree.map(cut, x)))


def _between_barriers(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """f between optimisation barriers, so that XLA compiles it alike in any context."""
    return lambda x: lax.optimization_barrier(f(lax.optimization_barrier(x)))


def _over_splits(x: Queries, fetch: Fetch, keys: int, spec: CacheSpec) -> Softmax:
    """The softmax of a block of queries, merged from `num_splits` softmaxes over parts of each query's keys."""
    splits = spec.num_splits or 1
    if splits == 1:
        return _over_keys(x, fetch, keys, spec)
    tokens = x.q.shape[0]
    begin, end = x.first // keys, -(-x.stop // keys)
    each = -(-(end - begin) // splits)
    part = jnp.arange(splits, dtype=jnp.int32)[None]
    repeated = lambda a: jnp.broadcast_to(a[:, None], (tokens, splits, *a.shape[1:]))
    first = jnp.maximum(x.first[:, None], (begin[:, None] + part * each[:, None]) * keys)
    stop = jnp.minimum(x.stop[:, None], (begin[:, None] + (part + 1) * each[:, None]) * keys)
    flat = lambda a: a.reshape(tokens * splits, *a.shape[2:])
    rows = jax.tree.map(flat, jax.tree.map(repeated, x)._replace(first=first, stop=stop))
    found = jax.tree.map(lambda a: a.reshape(tokens, splits, *a.shape[1:]), _over_keys(rows, fetch, keys, spec))
    total, *others = (jax.tree.map(lambda a, n=n: a[:, n], found) for n in range(splits))
    for other in others:
        total = _merged(total, other)
    return total


def _over_keys(x: Queries, fetch: Fetch, keys: int, spec: CacheSpec) -> Softmax:
    """The softmax by a loop over blocks of keys; each query begins at the block of its own first key."""
    begin = x.first // keys
    count = jnp.maximum(-(-x.stop // keys) - begin, 0)

    def of_block(n):
        position = ((begin + n) * keys)[:, None] + jnp.arange(keys, dtype=jnp.int32)[None]
        return softmax_of(x, position, *fetch(x.sequence, position), spec)

    return _running(of_block, np.int32(0), count.max())


def _running(of_block: Callable[[Array], Softmax], begin: Any, end: Any) -> Softmax:
    """The softmax over the blocks of keys begin ≤ n < end."""
    nothing = lambda a: jnp.full(a.shape, -np.inf if a.ndim == 3 else 0, a.dtype)
    m, l, o = jax.eval_shape(of_block, jax.ShapeDtypeStruct((), jnp.int32))
    start = Softmax(nothing(m), jnp.zeros(l.shape, l.dtype), nothing(o))
    return lax.fori_loop(begin, end, lambda n, total: _merged(total, of_block(n)), start)


def attend_one_sequence(x: Queries, fetch: Fetch, keys: int, spec: CacheSpec) -> tuple[Array, Array]:
    """o and lse of queries of one sequence; each block of keys is fetched once for all of them."""
    most = jnp.array(np.iinfo(np.int32).max, jnp.int32)
    begin = jnp.where(x.stop > x.first, x.first, most).min() // keys

    def of_block(n):
        position = n * keys + jnp.arange(keys, dtype=jnp.int32)
        k, v = (a[0] for a in fetch(x.sequence.max()[None], position[None]))
        return softmax_of(x, jnp.broadcast_to(position, (x.q.shape[0], keys)), k, v, spec)

    return results(_running(of_block, begin, -(-x.stop.max() // keys)), x)


# --- Pages ------------------------------------------------------------------------------------------------------------


def ragged_queries(x: Any, q: Array, size: int, spec: CacheSpec) -> Queries:
    """The tokens q [t,h,d] of a step as queries, with the tables of x and pages of `size` slots.

    Each sees the keys up to its own, or the cached ones and drafts, within the window and its block table.
    """
    at = places(q.shape[0], x.context_lens, x.query_start_loc, x.num_seqs)
    stop, cached = at.position + 1, None
    if x.draft_mask is not None:
        stop = x.context_lens[at.sequence]
        cached = stop - at.length
    first, stop = seen_until(at.position, jnp.where(at.valid, stop, 0), spec)
    stop = jnp.minimum(stop, x.block_tables.shape[1] * size)
    return Queries(q, at.sequence, first, stop, at.valid, cached, x.draft_mask, sinks_of(x.sinks, q.shape[0]))


def causal_queries(x: Any, q: Array, at: Places, size: int, spec: CacheSpec) -> Queries:
    """The tokens q [t,h,d] of a step at given places as queries, with the tables and sinks of x.

    Pages have `size` slots. Each token sees the keys up to its own, within the window and its block table.
    """
    first, stop = seen_until(at.position, jnp.where(at.valid, at.position + 1, 0), spec)
    stop = jnp.minimum(stop, x.block_tables.shape[1] * size)
    return Queries(q, at.sequence, first, stop, at.valid, sinks=sinks_of(x.sinks, q.shape[0]))


def of_pages(block_tables: Array, pages: int, size: int, read: Callable[[Array], tuple[Array, Array]]) -> Fetch:
    """A function that fetches keys by block tables [n,j]; `read` gives those of pages [t,c] as [t,c,s,g,·].

    Positions past a table's end, and pages that do not exist, are clamped: only pages of the pool are read.
    """

    def fetch(sequence: Array, position: Array) -> tuple[Array, Array]:
        column = jnp.clip(position[:, ::size] // size, 0, block_tables.shape[1] - 1)
        page = jnp.clip(block_tables[sequence[:, None], column], 0, pages - 1)
        return tuple(a.reshape(*position.shape, *a.shape[3:]) for a in read(page))

    return fetch


def dequantised(x: Array, scale: Array | None, page: Array, q: Any) -> Array:
    """Keys or values [t,c,s,g,·] of pages [t,c] times their scales [p?,s?,g?]; without scales in the dtype of q.

    That dtype holds all values of float8_e4m3fn and int8. With scales the product is in the dtype of statistics.
    """
    if scale is None:
        return x.astype(q)
    dtype = statistics_dtype(q)
    return x.astype(dtype) * scale[jnp.minimum(page, scale.shape[0] - 1)].astype(dtype)[..., None]
