"""Prefills over a cache quantised by TurboQuant: its keys are dequantised once, for all queries that read them.

A step is divided. Sequences with few tokens are computed over the cache as it is. The keys and values of the others are
dequantised into a smaller cache in the dtype of q, over which ragged_page_attention computes them: as many sequences as
fit it, then the next ones.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.kernels._dispatch import select
from ejkernel.kernels._places import places
from ejkernel.kernels._target import gpu_target
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention import Operands as OverPages
from ejkernel.xla_utils.search import entries_until

from .dequantise import Owners

# Slots of a page of the smaller cache: those that a program dequantises, and at least what a product has rows.
MOST_SLOTS, LEAST_SLOTS = 64, 16
# Slots of the smaller cache at least, unless all sequences together have fewer.
LEAST_CAPACITY = 32768

Results = tuple[Array, Array]


class _Group(NamedTuple):
    """Sequences first ≤ n < stop of a batch index, whose keys are in the smaller cache together.

    Attributes:
        owners: whose keys each page has.
        block_tables: [n,j], the pages of a sequence.
        context_lens: [n], 0 for all other sequences.
        is_in: [n] bool.
        stop: the first sequence of the next group.
    """

    owners: Owners
    block_tables: Array
    context_lens: Array
    is_in: Array
    stop: Array


def slots_of_page(x: Any) -> int | None:
    """Slots of a page of the smaller cache, which has as many for a sequence as its table; None if there is no such."""
    slots = math.gcd(MOST_SLOTS, x.block_tables.shape[2] * x.value_norms_pages.shape[2])
    return slots if slots >= LEAST_SLOTS else None


def divided(
    x: Any, most: int, over_cache: Callable[[Any], Results], over_dequantised: Callable[[Any], Results]
) -> Results:
    """o [b,t,h,d] and lse [b,t,h] of a step, of whose sequences those with up to `most` tokens are computed by the
    first function, as a step of their own, and all others by the second one.
    """
    lengths = _lengths(x)
    is_few = (lengths > 0) & (lengths <= most)
    few, token = _alone(x, jnp.where(is_few, lengths, 0), most)
    whole, parts = over_dequantised(x, jnp.where(is_few, 0, lengths)), over_cache(few)
    put = jax.vmap(lambda a, at, part: a.at[at].set(part, mode="drop"))
    return tuple(put(a, token, part) for a, part in zip(whole, parts, strict=True))


def _lengths(x: Any) -> Array:
    """[b,n], the tokens of each sequence."""
    cuts = x.query_start_loc.clip(0, x.q.shape[1])
    return jnp.where(jnp.arange(cuts.shape[1] - 1) < x.num_seqs, jnp.diff(cuts, axis=1), 0)


def _alone(x: Any, lengths: Array, most: int) -> tuple[Any, Array]:
    """The step of sequences with so many tokens [b,n], up to `most`, and the tokens that these are [b,·] in x."""
    tokens = min(x.q.shape[1], most * lengths.shape[1])

    def of_batch(starts: Array, lengths: Array) -> tuple[Array, Array]:
        cuts, token = jnp.pad(jnp.cumsum(lengths), (1, 0)), jnp.arange(tokens, dtype=np.int32)
        sequence = jnp.minimum(entries_until(cuts[1:], token), len(lengths) - 1)
        return cuts, jnp.where(token < cuts[-1], starts[sequence] + token - cuts[sequence], x.q.shape[1])

    cuts, token = jax.vmap(of_batch)(x.query_start_loc, lengths)
    q = jax.vmap(lambda q, at: q.at[at].get(mode="fill", fill_value=0))(x.q, token)
    return x._replace(q=q, query_start_loc=cuts.astype(np.int32)), token


def prefill(x: Any, lengths: Array, spec: CacheSpec, dequantise: Callable[[Owners, int], Array]) -> Results:
    """o and lse of the tokens of sequences with so many [b,n]; 0 and −∞ for tokens of no sequence, anything for others.

    `dequantise(owners, slots)` makes a cache with pages of so many slots.
    """
    (_, N, columns), page = x.block_tables.shape, slots_of_page(x)
    columns = columns * x.value_norms_pages.shape[2] // page
    pages = min(N * columns, max(columns, N + x.q.shape[1] // page, LEAST_CAPACITY // page))
    group_at = jax.vmap(partial(_group, page=page, pages=pages, columns=columns, left=spec.left))

    def of_group(first: Array) -> tuple[Results, _Group]:
        group = group_at(first, lengths, x.context_lens)
        over = OverPages(
            x.q, dequantise(group.owners, page), group.context_lens, group.block_tables, x.query_start_loc, x.num_seqs,
            sinks=x.sinks,
        )  # fmt: skip
        attention = select("ragged_page_attention", spec, over, gpu_target()).implementation
        return tuple(attention(*over, spec=spec, config=attention.heuristic(spec, over, gpu_target()))), group

    results, group = of_group(jnp.zeros(x.q.shape[0], np.int32))
    if pages == N * columns:
        return results

    def is_left(state: tuple[Array, Results]) -> Array:
        return jnp.any(state[0] < jnp.max(jnp.where(lengths > 0, jnp.arange(1, N + 1), 0), 1))

    at = jax.vmap(partial(places, x.q.shape[1]))(x.context_lens, x.query_start_loc, x.num_seqs)

    def next_group(state: tuple[Array, Results]) -> tuple[Array, Results]:
        first, results = state
        found, group = of_group(first)
        is_new = jnp.take_along_axis(group.is_in, at.sequence, 1) & at.valid
        take = lambda new, old: jnp.where(is_new.reshape(*is_new.shape, *(1,) * (new.ndim - 2)), new, old)
        return group.stop, jax.tree.map(take, found, results)

    return lax.while_loop(is_left, next_group, (group.stop, results))[1]


def _group(
    first: Array, lengths: Array, contexts: Array, *, page: int, pages: int, columns: int, left: int | None
) -> _Group:
    """The sequences from `first` on that fit so many pages; pages before the windows of a sequence are left out."""
    n = jnp.arange(len(lengths), dtype=np.int32)
    contexts = jnp.where(lengths > 0, contexts, 0)
    before = jnp.zeros_like(n) if left is None else jnp.maximum(contexts - lengths - left, 0) // page
    count = jnp.clip(-(-contexts // page), 0, columns) - jnp.minimum(before, columns)
    count = jnp.where(n >= first, jnp.maximum(count, 0), 0)
    end = jnp.cumsum(count).astype(np.int32)
    begin, is_in = end - count, (n >= first) & (end <= pages)
    number = jnp.arange(pages, dtype=np.int32)
    owner = entries_until(end, number)
    is_owned = is_in.at[owner].get(mode="fill", fill_value=False)
    owner = jnp.where(is_owned, owner, len(n))
    of_owner = lambda a: a.at[owner].get(mode="fill", fill_value=0)
    position = (number - of_owner(begin) + of_owner(before)) * page
    tables = (begin - before)[:, None] + jnp.arange(columns, dtype=np.int32)
    stop = first + jnp.sum(is_in, dtype=np.int32)
    return _Group(Owners(owner, position), tables.clip(0, pages - 1), jnp.where(is_in, contexts, 0), is_in, stop)
