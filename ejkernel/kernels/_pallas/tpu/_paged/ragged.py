"""A step of serving over pages: decode, prefill and chunks of it, mixed as they come.

Sequences of which the step has one token are computed as in decoding, a tile each. The tokens of the others are cut
into tiles of `queries_per_block`, as they follow one another in the step, and a tile has a work item for each sequence
that has tokens in it. With one token in a tile all are computed alike, whatever the step is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._xla._pages import places, seen_until
from ejkernel.primitives._pages import CacheSpec
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from .._work_list import count_of, item_at, most_work_items, work_list
from . import piece_of
from .cache import Cache
from .kernel import Inputs, Problem, attend
from .tiles import tile_of_sinks, tiles_of, tokens_of
from .work import listed


class Step(NamedTuple):
    """Where the tokens of a step stand, [b,t], and where those of sequences begin and end, [b,n].

    Attributes:
        sequence: of each token; 0 of one that is of none.
        position: in its sequence.
        valid: whether it is of any.
        first, stop: the keys first ≤ j < stop that it sees.
        starts, ends: of the sequences that there are; the others have no tokens.
    """

    sequence: Array
    position: Array
    valid: Array
    first: Array
    stop: Array
    starts: Array
    ends: Array


def step_of(x: Any, tokens: int, size: int, spec: CacheSpec) -> Step:
    """That of the tables [b,...] of x, for pages of that size."""

    def of_batch(context_lens, query_start_loc, num_seqs):
        at = places(tokens, context_lens, query_start_loc, num_seqs)
        first, stop = seen_until(at.position, jnp.where(at.valid, at.position + 1, 0), spec)
        stop = jnp.minimum(stop, x.block_tables.shape[2] * size)
        sequence = jnp.arange(context_lens.shape[0], dtype=jnp.int32)
        cuts = jnp.where(sequence < num_seqs[0], query_start_loc[:-1], 0), query_start_loc[1:]
        starts, ends = (jnp.where(sequence < num_seqs[0], jnp.clip(cut, 0, tokens), 0) for cut in cuts)
        return Step(at.sequence, at.position, at.valid, first, stop, starts, jnp.maximum(ends, starts))

    return jax.vmap(of_batch)(x.context_lens, x.query_start_loc, x.num_seqs)


def ragged(x: Any, pages: Array, spec: CacheSpec, config: RaggedPageAttentionConfig, name: str) -> tuple[Array, Array]:
    """o [b,t,h,d] and lse [b,t,h] of queries x.q over the pages [b?,p,s,g,2,d], by the tables of x."""
    (_, t, h, d), (_, count, size, g, _, _) = x.q.shape, pages.shape
    columns = x.block_tables.shape[2]
    step = step_of(x, t, size, spec)
    piece = piece_of(size)
    cache = Cache(piece, config.pages_per_block * (size // piece), 2 * g, d, pages.dtype)
    pool = count * (size // piece) if pages.shape[0] > 1 else 0
    stored, table = (cache.stored(pages.reshape(*pages.shape[:3], 2 * g, d)),), x.block_tables.reshape(-1)
    scales = [None if a is None else a[:, 0, 0] for a in (getattr(x, "k_scale", None), getattr(x, "v_scale", None))]

    def over(q: Array, tokens: int, kind: str, **fields: Any) -> list[Array]:
        """o and lse of queries [n,h,d] in tiles of so many tokens, by the fields of their work items."""
        problem = Problem(spec, (cache,), h // g, tokens, columns, count, size // piece, pool)
        items = listed(problem.keys, **fields)
        given = Inputs(tiles_of(q, g, tokens), stored, tile_of_sinks(x.sinks, g, tokens), *scales, table)
        return [tokens_of(a, q.shape[0], h // g, tokens) for a in attend(items, given, problem, f"{name}_{kind}")]

    found = (
        _each_alone(x.q, step, over)
        if config.queries_per_block == 1
        else _in_tiles(x.q, step, config.queries_per_block, over)
    )
    valid = step.valid[..., None]
    return jnp.where(valid[..., None], found[0], 0), jnp.where(valid, found[1], -jnp.inf)


def _each_alone(q: Array, step: Step, over: Callable) -> list[Array]:
    """A tile and a work item for each token."""
    (b, t, h, d), n = q.shape, step.starts.shape[1]
    token, batch = jnp.arange(b * t, dtype=jnp.int32), jnp.repeat(jnp.arange(b, dtype=jnp.int32), t)
    found = over(
        q.reshape(b * t, h, d),
        1,
        "tokens",
        tile=token,
        sequence=batch * n + step.sequence.reshape(-1),
        batch=batch,
        first=step.first.reshape(-1),
        stop=step.stop.reshape(-1),
        position=0,
        begin=0,
        end=1,
    )
    return [a.reshape(b, t, *a.shape[1:]) for a in found]


def _in_tiles(q: Array, step: Step, tokens: int, over: Callable) -> list[Array]:
    """Sequences with one token decode; those of all others are in tiles."""
    (b, t, _, _), n = q.shape, step.starts.shape[1]
    alone = (step.ends - step.starts == 1).reshape(-1)
    decoded, prefilled = _decoded(q, step, alone, over), _prefilled(q, step, ~alone, tokens, over)
    row = jnp.arange(b, dtype=jnp.int32)[:, None] * n + step.sequence
    is_alone = lambda a: alone[row].reshape(b, t, *(1,) * (a.ndim - 2))
    return [jnp.where(is_alone(b), a[row], b) for a, b in zip(decoded, prefilled, strict=True)]


def _decoded(q: Array, step: Step, alone: Array, over: Callable) -> list[Array]:
    """[b·n,h,·]: of each sequence its first token, if that is `alone`."""
    (b, t, _, _), n = q.shape, step.starts.shape[1]
    sequence, token = jnp.arange(b * n, dtype=jnp.int32), jnp.clip(step.starts, 0, t - 1).reshape(-1)
    of = lambda a: a[sequence // n, token]
    return over(
        of(q),
        1,
        "decode",
        tile=sequence,
        sequence=sequence,
        batch=sequence // n,
        first=of(step.first),
        stop=jnp.where(alone, of(step.stop), 0),
        position=0,
        begin=0,
        end=alone,
    )


def _prefilled(q: Array, step: Step, active: Array, tokens: int, over: Callable) -> list[Array]:
    """[b,t,h,·]: the tokens of those sequences that are `active`."""
    (b, t, h, d), n, tiles = q.shape, step.starts.shape[1], -(-q.shape[1] // tokens)
    batch = jnp.repeat(jnp.arange(b, dtype=jnp.int32), n)
    work = work_list(
        batch, step.starts.reshape(-1), step.ends.reshape(-1), tokens, b * most_work_items(t, tokens, n), active=active
    )
    item = item_at(work, jnp.arange(count_of(work), dtype=jnp.int32))
    tile = jnp.clip(item.tile, 0, tiles - 1)
    begin = jnp.maximum(item.start, tile * tokens)
    end = jnp.maximum(jnp.minimum(item.end, (tile + 1) * tokens), begin)
    of = lambda a, token: a[item.batch, jnp.clip(token, 0, t - 1)]
    found = over(
        jnp.pad(q, ((0, 0), (0, tiles * tokens - t), (0, 0), (0, 0))).reshape(b * tiles * tokens, h, d),
        tokens,
        "prefill",
        tile=item.batch * tiles + tile,
        sequence=item.segment,
        batch=item.batch,
        first=of(step.first, begin),
        stop=jnp.where(end > begin, of(step.stop, end - 1), 0),
        position=of(step.position, begin) - (begin - tile * tokens),
        begin=begin - tile * tokens,
        end=end - tile * tokens,
    )
    return [a.reshape(b, tiles * tokens, *a.shape[1:])[:, :t] for a in found]
