"""The work list of a step over pages, from lengths that may be traced: what each program of a kernel computes.

A row is a group of tokens of one request that are computed together: one token in a decode, up to `tokens_per_item` in
a prefill. Its pages are split into work items, none with more than an equal share of the pages of all rows:

    share = ⌈Σ_rows pages / workers⌉,     items of a row = max(1, ⌈pages / share⌉),     of all ≤ rows + workers

The list has rows + workers entries whatever the lengths are: the longest items first, then entries without work.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ejkernel.xla_utils.search import entries_until

from ._visibility import interval


class WorkItem(NamedTuple):
    """The eight numbers of a work item, as the last axis of a plan has them.

    Attributes:
        request: the request that the pages belong to.
        token: the first of its tokens in the step.
        tokens: how many; 0 is no work.
        page: the first page, counted in the table of the request.
        pages: how many, some of which may be masked for some of the tokens; 0 where the tokens see no key.
        slot: where the partial result goes, below 2·rows·(items − 1) for a plan [rows, items, 8]; −1 where it is whole.
        split: which of the items of its row this is, by which slots follow one another: slot − split is the first.
        splits: how many items its row has, which are merged by their lse.
    """

    request: Array
    token: Array
    tokens: Array
    page: Array
    pages: Array
    slot: Array
    split: Array
    splits: Array


class Rows(NamedTuple):
    """For each row its request, first token, number of tokens, first page and number of pages, int32 [rows]."""

    request: Array
    token: Array
    tokens: Array
    page: Array
    pages: Array


def plan_shape(rows: int, workers: int) -> tuple[int, int, int]:
    """[rows, items, 8] with places for rows + workers items."""
    return rows, 1 + -(-workers // rows), len(WorkItem._fields)


def decode_rows(context_lens: Array, page_size: int, left: int | None) -> Rows:
    """A row for each sequence, whose one token sees the keys before it and `left` at most."""
    request = jnp.arange(context_lens.shape[0], dtype=jnp.int32)
    page, pages = _pages(context_lens - 1, context_lens, page_size, left)
    return Rows(request, request, jnp.ones_like(request), page, pages)


def ragged_rows(
    context_lens: Array,
    query_start_loc: Array,
    count: Array,
    num_tokens: int,
    page_size: int,
    left: int | None,
    tokens_per_item: int,
    drafts: int | None,
) -> Rows:
    """The N + ⌊num_tokens / tokens_per_item⌋ rows of a step; unused rows have no tokens."""
    n = context_lens.shape[0]
    starts = jnp.where(jnp.arange(n + 1, dtype=jnp.int32) <= count, query_start_loc, query_start_loc[count])
    starts = jnp.clip(starts, 0, num_tokens)
    lengths = jnp.maximum(starts[1:] - starts[:-1], 0)
    needed = -(-lengths // tokens_per_item)
    ends = jnp.cumsum(needed, dtype=jnp.int32)
    row = jnp.arange(n + num_tokens // tokens_per_item, dtype=jnp.int32)
    request = jnp.minimum(entries_until(ends, row), n - 1)
    length, context = lengths[request], context_lens[request]
    before = (row - ends[request] + needed[request]) * tokens_per_item
    tokens = jnp.where(row < ends[-1], jnp.clip(length - before, 0, tokens_per_item), 0)
    cached = context - length
    stop = cached + (before + tokens if drafts is None else jnp.minimum(length, drafts))
    page, pages = _pages(cached + before, jnp.where(tokens > 0, stop, 0), page_size, left)
    some = lambda x: jnp.where(tokens > 0, x, 0)
    return Rows(some(request), some(starts[request] + before), tokens, page, pages)


def _pages(position: Array, stop: Array, page_size: int, left: int | None) -> tuple[Array, Array]:
    """The first page, and the number of pages, with keys j < stop that a query at a position sees."""
    first, stop = interval(position, left, None, 0, stop)
    return first // page_size, -(-stop // page_size) - first // page_size


def work_list(rows: Rows, workers: int) -> Array:
    """The plan, int32 [rows, items, 8]: `WorkItem`s along the last axis, in the order of the first two."""
    count, per_row, numbers = plan_shape(rows.request.shape[0], workers)
    share = jnp.maximum(-(-rows.pages.sum(dtype=jnp.int32) // workers), 1)
    splits = jnp.where(rows.tokens > 0, jnp.maximum(-(-rows.pages // share), 1), 0)
    ends = jnp.cumsum(splits, dtype=jnp.int32)
    partial = jnp.where(splits > 1, splits, 0)
    slots = jnp.cumsum(partial, dtype=jnp.int32) - partial
    item = jnp.arange(count * per_row, dtype=jnp.int32)
    row = jnp.minimum(entries_until(ends, item), count - 1)
    of = Rows(*(x[row] for x in rows))
    is_work, parts = item < ends[-1], jnp.maximum(splits[row], 1)
    split = item - (ends[row] - splits[row])
    each, more = of.pages // parts, of.pages % parts
    found = WorkItem(
        of.request,
        of.token,
        of.tokens,
        page=of.page + split * each + jnp.minimum(split, more),
        pages=each + (split < more).astype(jnp.int32),
        slot=jnp.where(parts > 1, slots[row] + split, -1),
        split=split,
        splits=parts,
    )
    listed = jnp.where(is_work[:, None], jnp.stack(found, axis=1), 0)
    longest_first = jnp.argsort(jnp.where(is_work, -found.pages, 1), stable=True)
    return listed[longest_first].reshape(count, per_row, numbers)
