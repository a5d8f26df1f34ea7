"""Decoding: one query of each sequence, over keys and values in pages or in a dense cache."""

import jax.numpy as jnp
from jax import Array

from ejkernel.primitives._pages import CacheSpec

from . import piece_of
from .cache import Cache
from .kernel import attend
from .problem import Inputs, Problem
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
        k_scale, v_scale: [b?,1,1,g?] float32.
        spec: what is computed.
        keys: keys of a block.
        name: the name of the kernel.
    """
    n, slots, heads = q.shape[0], k.shape[-3], k.shape[-2]
    piece = piece_of(slots)
    caches = tuple(Cache(piece, max(1, keys // piece), heads, a.shape[-1], a.dtype) for a in (k, v))
    group = q.shape[1] // heads
    if block_tables is None:
        problem = Problem(spec, caches, group, 1, slots // piece)
    else:
        pages, pieces = k.shape[1], slots // piece
        pool = pages * pieces if k.shape[0] > 1 else 0
        problem = Problem(spec, caches, group, 1, block_tables.shape[1], pages, pieces, pool)
    sequence = jnp.arange(n, dtype=jnp.int32)
    items = listed(problem.keys, tile=sequence, sequence=sequence, batch=batch, first=first, stop=stop)
    of_heads = lambda scale: None if scale is None else scale[:, 0, 0]
    given = Inputs(
        tiles_of(q, heads, 1),
        tuple(cache.stored(a) for cache, a in zip(caches, (k, v), strict=True)),
        tile_of_sinks(sinks, heads, 1),
        k_scale=of_heads(k_scale),
        v_scale=of_heads(v_scale),
        table=None if block_tables is None else block_tables.reshape(-1),
    )
    return tuple(tokens_of(a, n, group, 1) for a in attend(items, given, problem, name))
