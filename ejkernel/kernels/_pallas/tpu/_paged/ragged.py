"""A step of serving over pages: any mixture of decode, prefill and chunked prefill.

Sequences with one token in the step are decoded, each in its own tile. The tokens of all others are cut into tiles of
`queries_per_block` in the order of the step; a tile has a work item for each sequence with tokens in it. With one token
per tile all sequences are computed in the same way, whatever else is in the step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._xla._pages import places, seen_until
from ejkernel.primitives._pages import CacheSpec

from .._work_list import count_of, item_at, most_work_items, work_list
from . import piece_of
from .cache import Cache
from .kernel import attend
from .problem import Inputs, Problem
from .scales import of_heads, slot_scales
from .tiles import tile_of_sinks, tiles_of, tiles_of_drafts, tokens_of
from .work import listed

Scales = tuple[Array | None, Array | None]


class Step(NamedTuple):
    """The places of the tokens of a step in sequences, [b,t], and of sequences in the step, [b,n].

    Attributes:
        sequence: the sequence of each token; 0 for a token of none.
        position: the position of each token in its sequence.
        valid: whether a token belongs to a sequence.
        cached: the position of the first new token of its sequence.
        first, stop: the range first ≤ j < stop of keys that a token sees, before the mask of drafts.
        starts, ends: the tokens of each sequence in the step; unused sequences have none.
    """

    sequence: Array
    position: Array
    valid: Array
    cached: Array
    first: Array
    stop: Array
    starts: Array
    ends: Array


class Queries(NamedTuple):
    """q [..., h, d] of tokens, and the rows of their draft mask [..., w], None without drafts."""

    q: Array
    drafts: Array | None


def step_of(x: Any, tokens: int, size: int, spec: CacheSpec) -> Step:
    """The `Step` of the tables [b,...] in x, for pages of `size` slots."""

    def of_batch(context_lens, query_start_loc, num_seqs):
        at = places(tokens, context_lens, query_start_loc, num_seqs)
        context = context_lens[at.sequence]
        stop = at.position + 1 if getattr(x, "draft_mask", None) is None else context
        first, stop = seen_until(at.position, jnp.where(at.valid, stop, 0), spec)
        stop = jnp.minimum(stop, x.block_tables.shape[2] * size)
        sequence = jnp.arange(context_lens.shape[0], dtype=jnp.int32)
        cuts = jnp.where(sequence < num_seqs[0], query_start_loc[:-1], 0), query_start_loc[1:]
        starts, ends = (jnp.where(sequence < num_seqs[0], jnp.clip(cut, 0, tokens), 0) for cut in cuts)
        return Step(
            at.sequence, at.position, at.valid, context - at.length, first, stop, starts, jnp.maximum(ends, starts)
        )

    return jax.vmap(of_batch)(x.context_lens, x.query_start_loc, x.num_seqs)


def ragged(
    x: Any, q: Array, pages: Array, scales: Scales, spec: CacheSpec, config: Any, name: str, latent: int = 0
) -> tuple[Array, Array]:
    """o [b,t,h,e] and lse [b,t,h] of a step of queries over pages.

    Args:
        x: the tables of the step, sinks and drafts.
        q: [b,t,h,d].
        pages: [b?,p,s,g,2,d], alternating keys and values, or with `latent` [b?,p,s,d].
        scales: the scales of keys and of values, [b?,p?,s?,g?] float32 or None.
        spec: what is computed.
        config: a config with `queries_per_block` and `pages_per_block`.
        name: the name of the kernels.
        latent: the number of first features of a key that are its value; 0 if values are stored.
    """
    pages = pages.reshape(*pages.shape[:3], -1, pages.shape[-1])
    (_, t, h, d), (_, count, size, rows, _) = q.shape, pages.shape
    columns, g = x.block_tables.shape[2], 1 if latent else rows // 2
    step = step_of(x, t, size, spec)
    piece, table = piece_of(size), x.block_tables.reshape(-1)
    pieces = size // piece
    sizes, pool = dict(piece=piece, pieces=config.pages_per_block * pieces), count * pieces
    own = pool if pages.shape[0] > 1 else 0
    cache = Cache(**sizes, rows=rows, features=d, dtype=pages.dtype, pieces_of_page=pieces, pool=own)
    of_slots = slot_scales(scales, **sizes, heads=g, pool=pool)
    layouts = tuple(layout for layout, _ in of_slots)
    stored = (cache.stored(pages),), tuple(layout.stored(scale, count, size) for layout, scale in of_slots)

    def over(queries: Queries, tokens: int, kind: str, **fields: Any) -> list[Array]:
        """o and lse of queries [n,h,d] in tiles of `tokens` tokens, from the fields of their work items."""
        q, drafts = queries.q, tiles_of_drafts(queries.drafts, h // g, tokens)
        problem = Problem(spec, (cache,), h // g, tokens, columns, count, pieces, layouts, latent)
        items = listed(problem.keys, **fields)
        tile = tiles_of(q, g, tokens), stored[0], tile_of_sinks(x.sinks, g, tokens), drafts
        given = Inputs(*tile, *map(of_heads, scales), stored[1], table)
        return [tokens_of(a, q.shape[0], h // g, tokens) for a in attend(items, given, problem, f"{name}_{kind}")]

    o, lse = over_step(Queries(q, getattr(x, "draft_mask", None)), step, config.queries_per_block, over)
    return o.astype(q.dtype), lse


def over_step(queries: Queries, step: Step, tokens: int, over: Callable) -> tuple[Array, Array]:
    """o and lse of a step in tiles of `tokens` tokens; 0 and −∞ for tokens of no sequence.

    `over(queries, tokens, kind, **fields)` computes those of queries [n,h,d] from the fields of their work items.
    """
    found = _each_alone(queries, step, over) if tokens == 1 else _in_tiles(queries, step, tokens, over)
    valid = step.valid[..., None]
    return jnp.where(valid[..., None], found[0], 0), jnp.where(valid, found[1], -jnp.inf)


def _each_alone(queries: Queries, step: Step, over: Callable) -> list[Array]:
    """o and lse, with a tile and a work item for each token."""
    (b, t, _, _), n = queries.q.shape, step.starts.shape[1]
    flat = lambda a: a.reshape(b * t, *a.shape[2:])
    token, batch = jnp.arange(b * t, dtype=jnp.int32), jnp.repeat(jnp.arange(b, dtype=jnp.int32), t)
    found = over(
        jax.tree.map(flat, queries),
        1,
        "tokens",
        tile=token,
        sequence=batch * n + flat(step.sequence),
        batch=batch,
        first=flat(step.first),
        stop=flat(step.stop),
        cached=flat(step.cached),
    )
    return [a.reshape(b, t, *a.shape[1:]) for a in found]


def _in_tiles(queries: Queries, step: Step, tokens: int, over: Callable) -> list[Array]:
    """o and lse, with sequences of one token decoded and the tokens of all others in tiles."""
    (b, t, _, _), n = queries.q.shape, step.starts.shape[1]
    alone = (step.ends - step.starts == 1).reshape(-1)
    decoded, prefilled = _decoded(queries, step, alone, over), _prefilled(queries, step, ~alone, tokens, over)
    row = jnp.arange(b, dtype=jnp.int32)[:, None] * n + step.sequence
    chosen = lambda x, y: jnp.where(alone[row].reshape(b, t, *(1,) * (y.ndim - 2)), x[row], y)
    return list(map(chosen, decoded, prefilled))


def _decoded(queries: Queries, step: Step, alone: Array, over: Callable) -> list[Array]:
    """o and lse [b·n,h,·] of the first token of each sequence, computed if that is its only one (`alone`)."""
    (b, t, _, _), n = queries.q.shape, step.starts.shape[1]
    sequence, token = jnp.arange(b * n, dtype=jnp.int32), jnp.clip(step.starts, 0, t - 1).reshape(-1)
    of = lambda a: a[sequence // n, token]
    return over(
        jax.tree.map(of, queries),
        1,
        "decode",
        tile=sequence,
        sequence=sequence,
        batch=sequence // n,
        first=of(step.first),
        stop=jnp.where(alone, of(step.stop), 0),
        cached=of(step.cached),
        end=alone,
    )


def _prefilled(queries: Queries, step: Step, active: Array, tokens: int, over: Callable) -> list[Array]:
    """o and lse [b,t,h,·], computed for the tokens of `active` sequences."""
    (b, t, _, _), n = queries.q.shape, step.starts.shape[1]
    tiles = -(-t // tokens)
    batch = jnp.repeat(jnp.arange(b, dtype=jnp.int32), n)
    work = work_list(
        batch, step.starts.reshape(-1), step.ends.reshape(-1), tokens, b * most_work_items(t, tokens, n), active=active
    )
    item = item_at(work, jnp.arange(count_of(work), dtype=jnp.int32))
    tile = jnp.clip(item.tile, 0, tiles - 1)
    begin = jnp.maximum(item.start, tile * tokens)
    end = jnp.maximum(jnp.minimum(item.end, (tile + 1) * tokens), begin)
    of = lambda a, token: a[item.batch, jnp.clip(token, 0, t - 1)]
    filled = lambda a: jnp.pad(a, ((0, 0), (0, tiles * tokens - t), *[(0, 0)] * (a.ndim - 2)))
    found = over(
        jax.tree.map(lambda a: filled(a).reshape(b * tiles * tokens, *a.shape[2:]), queries),
        tokens,
        "prefill",
        tile=item.batch * tiles + tile,
        sequence=item.segment,
        batch=item.batch,
        first=of(step.first, begin),
        stop=jnp.where(end > begin, of(step.stop, end - 1), 0),
        position=of(step.position, begin) - (begin - tile * tokens),
        cached=of(step.cached, begin),
        begin=begin - tile * tokens,
        end=end - tile * tokens,
    )
    return [a.reshape(b, tiles * tokens, *a.shape[1:])[:, :t] for a in found]
