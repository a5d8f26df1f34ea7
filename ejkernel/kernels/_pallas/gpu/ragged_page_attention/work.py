"""The work tiles of a step, made on the device from its lengths; each has some tokens of one sequence.

Sequences with few tokens are left to the decoding kernel. Of the rest, sequence n with q_n tokens has ⌈q_n / block_q⌉
work tiles, at most T / block_q + N of all. Tokens of no sequence, before the first and after the last, are two
sequences more whose tokens are placed before every key, and so get o = 0 and lse = −∞: every token is written.

The longest sequences come first, and of each the last tokens, so that thread blocks that take tiles one after the other
end at about the same time, and those at work together read the keys of the same sequence from the L2 cache.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._visibility import interval


class WorkTile(NamedTuple):
    """Tokens of one sequence, int32, as the last axis of the table has them.

    Attributes:
        token: the first, counted over all batches.
        tokens: how many.
        position: where the first stands among the keys; negative before all of them.
        sequence: counted over all batches, whose row of the block tables is read.
        first_key, stop: keys first_key ≤ j < stop may be seen by some token of the step; others may hold anything.
    """

    token: Array
    tokens: Array
    position: Array
    sequence: Array
    first_key: Array
    stop: Array


def most_tiles(batches: int, sequences: int, tokens: int, block_q: int) -> int:
    """The length of the table: an upper bound of the number of work tiles, whatever the lengths are."""
    return batches * (tokens // block_q + sequences + 2)


def work_tiles(
    context_lens: Array, query_start_loc: Array, num_seqs: Array, tokens: int, block_q: int, least: int,
    left: int | None, keys: int,
) -> tuple[Array, Array]:  # fmt: skip
    """The table [most_tiles, 6], and how many of its entries are work tiles, [1].

    Of context_lens [b,n], query_start_loc [b,n + 1] and num_seqs [b,1]. Sequences of less than `least` tokens have no
    tiles. A token sees `left` keys before its own, and a sequence has `keys` slots.
    """
    batches, sequences = context_lens.shape
    batch, number = (jnp.arange(n, dtype=jnp.int32) for n in (batches, sequences + 2))
    bounds, count = jnp.clip(query_start_loc, 0, tokens), jnp.clip(num_seqs, 0, sequences)
    begin, end = bounds[:, :1], jnp.take_along_axis(bounds, count, 1)
    # The last two sequences are the tokens before all others and after them.
    length = jnp.diff(bounds)
    length = jnp.where((number[:-2] < count) & (length >= least), length, 0)
    length = jnp.concatenate([length, begin, tokens - end], 1)
    start = jnp.concatenate([bounds[:, :-1], jnp.zeros_like(begin), end], 1)
    context = jnp.pad(context_lens, ((0, 0), (0, 2)))
    position = context - length
    first, stop = interval(position, left, None, 0, jnp.clip(context, 0, keys))
    found = WorkTile(
        token=start + batch[:, None] * tokens,
        tokens=length,
        position=position,
        sequence=jnp.minimum(number, sequences - 1) + batch[:, None] * sequences,
        first_key=first,
        stop=stop,
    )
    # All pairs of sequences at once, where a sort and a cumulative sum would be launches of their own.
    tiles, context = (-(-length // block_q)).reshape(-1), context.reshape(-1)
    index = jnp.arange(len(tiles), dtype=jnp.int32)
    longer = context > context[:, None]
    earlier = longer | (context == context[:, None]) & (index < index[:, None])
    before = jnp.sum(jnp.where(earlier, tiles, 0), 1)
    place = jnp.arange(most_tiles(batches, sequences, tokens, block_q), dtype=jnp.int32)[:, None]
    owns = (before <= place) & (place < before + tiles)
    of_place = lambda x: jnp.sum(jnp.where(owns, x.reshape(-1), 0), 1)
    found = WorkTile(*map(of_place, found))
    offset = (of_place(before + tiles - 1) - place[:, 0]) * block_q
    found = found._replace(
        token=found.token + offset,
        tokens=jnp.minimum(found.tokens - offset, block_q),
        position=found.position + offset,
    )
    return jnp.stack(found, 1), jnp.minimum(jnp.sum(tiles), len(place)).reshape(1)
