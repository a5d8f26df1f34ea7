"""The table of work tiles by its definition, for all pairs of sequences, and of places and sequences."""

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._pallas.gpu.ragged_page_attention.work import WorkTile, most_tiles
from ejkernel.kernels._visibility import interval


def work_tiles(
    context_lens: Array, query_start_loc: Array, num_seqs: Array, tokens: int, block_q: int, least: int,
    left: int | None, keys: int, most_keys: int = 0, least_decodes: int = 0, of_step: Array | None = None,
) -> tuple[Array, Array, Array | None]:  # fmt: skip
    """The table [most_tiles, 6], how many of its entries are work tiles [1], and the keys of decodes with some."""
    batches, sequences = context_lens.shape
    batch, number = (jnp.arange(n, dtype=jnp.int32) for n in (batches, sequences + 2))
    bounds, count = jnp.clip(query_start_loc, 0, tokens), jnp.clip(num_seqs, 0, sequences)
    begin, end = bounds[:, :1], jnp.take_along_axis(bounds, count, 1)
    # The last two sequences are the tokens before all others and after them.
    length = jnp.diff(bounds)
    is_decode = (number[:-2] < count) & (length > 0) & (length < least) & (context_lens <= most_keys)
    is_decode &= most_keys > 0
    is_prefill = (number[:-2] < count) & (length >= least) & (context_lens > 0)
    has_decodes = is_prefill.any() & (jnp.sum(is_decode) >= max(1, least_decodes))
    is_decode &= has_decodes
    length = jnp.where((number[:-2] < count) & (length >= least) | is_decode, length, 0)
    length = jnp.concatenate([length, begin, tokens - end], 1)
    start = jnp.concatenate([bounds[:, :-1], jnp.zeros_like(begin), end], 1)
    context = jnp.pad(context_lens, ((0, 0), (0, 2)))
    position = context - length
    stop = jnp.clip(context, 0, keys)
    first, stop = interval(
        position,
        left,
        None,
        0,
        stop if of_step is None else jnp.minimum(stop, position + jnp.pad(of_step, ((0, 0), (0, 2)))),
    )
    found = WorkTile(
        token=start + batch[:, None] * tokens,
        tokens=length,
        position=position,
        sequence=jnp.minimum(number, sequences - 1) + batch[:, None] * sequences,
        first_key=first,
        stop=stop,
    )
    tiles, context = (-(-length // block_q)).reshape(-1), context.reshape(-1)
    index = jnp.arange(len(tiles), dtype=jnp.int32)
    longer = context > context[:, None]
    earlier = longer | (context == context[:, None]) & (index < index[:, None])
    is_decode = jnp.pad(is_decode, ((0, 0), (0, 2))).reshape(-1)
    earlier = (is_decode < is_decode[:, None]) | (is_decode == is_decode[:, None]) & earlier
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
    total = jnp.minimum(jnp.sum(tiles), len(place)).reshape(1)
    tiled_keys = jnp.where(has_decodes, most_keys, -(2**31)).astype(jnp.int32).reshape(1) if most_keys else None
    return jnp.stack(found, 1), total, tiled_keys
