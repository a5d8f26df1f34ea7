"""Decoding: one query of each sequence, over keys and values in pages or in a dense cache."""

import jax.numpy as jnp
from jax import Array

from ejkernel.primitives._pages import CacheSpec

from . import piece_of
from .cache import Cache
from .kernel import attend
from .problem import Inputs, Problem
from .scales import of_heads, slot_scales
from .tiles import tile_of_sinks, tiles_of, tokens_of
from .work import listed


def decode(
    q: Array,
    k: Array,
    v: Array,
    first: Array,
    stop: Array,
    batch: Array,
    block_tables: Array | None,
    sinks: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    *,
    spec: CacheSpec,
    keys: int,
    name: str,
) -> tuple[Array, Array]:
    """o [n,h,e] and lse [n,h] of queries [n,h,d], each over the keys first ≤ j < stop of its sequence.

    Args:
        q: the queries.
        k, v: pages [b?,p,s,g,·] or, without `block_tables`, dense caches [n,s,g,·].
        first, stop: [n] int32.
        batch: [n] int32, the batch element of each query, which selects pages, sinks and scales.
        block_tables: [n,j] int32.
        sinks: [b?,h,x].
        k_scale, v_scale: [b?,p?,s?,g?] float32.
        spec: what is computed.
        keys: keys of a block.
        name: the name of the kernel.
    """
    n, slots, heads = q.shape[0], k.shape[-3], k.shape[-2]
    piece = piece_of(slots)
    sizes, pieces, group = dict(piece=piece, pieces=max(1, keys // piece)), slots // piece, q.shape[1] // heads
    cache_of = lambda a, pool: Cache(
        **sizes, rows=heads, features=a.shape[-1], dtype=a.dtype, pieces_of_page=pieces, pool=pool
    )
    if block_tables is None:
        scales, problem = [], Problem(spec, tuple(cache_of(a, 0) for a in (k, v)), group, 1, pieces)
    else:
        pages = k.shape[1]
        scales = slot_scales((k_scale, v_scale), **sizes, heads=heads, pool=pages * pieces)
        caches = tuple(cache_of(a, pages * pieces if a.shape[0] > 1 else 0) for a in (k, v))
        layouts = tuple(layout for layout, _ in scales)
        problem = Problem(spec, caches, group, 1, block_tables.shape[1], pages, pieces, layouts)
    sequence = jnp.arange(n, dtype=jnp.int32)
    items = listed(problem.keys, tile=sequence, sequence=sequence, batch=batch, first=first, stop=stop)
    given = Inputs(
        tiles_of(q, heads, 1),
        tuple(cache.stored(a) for cache, a in zip(problem.caches, (k, v), strict=True)),
        tile_of_sinks(sinks, heads, 1),
        k_scale=of_heads(k_scale),
        v_scale=of_heads(v_scale),
        scales=tuple(layout.stored(scale, problem.pages, slots) for layout, scale in scales),
        table=None if block_tables is None else block_tables.reshape(-1),
    )
    o, lse = (tokens_of(a, n, group, 1) for a in attend(items, given, problem, name))
    return o.astype(q.dtype), lse
