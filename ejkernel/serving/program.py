"""The program of a step: tokens of many sequences in, the next token of each of them out.

Its shapes are the bucket of the step and the limits of the engine, so that one program serves every mixture of prompts,
decode and drafts; a small one after it samples. The caches and the tokens that were sampled last are donated: they stay
on the device, in place.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import lax
from .model import HEADS, Decoder, Weights, hidden_states, logits_of
from .sampling import Kind, SamplingArrays, sample
from .scheduler import Chunk, Request

MOST_DRAFTS = 31
"""Of a tree: the bits of an integer say which of them a token follows."""
SAMPLED_LAST = -1
"""In the place of a token that no host has read yet: the one that was sampled last for its sequence."""


class Step(NamedTuple):
    """What a step computes, in slots that hold a sequence each; all of it is int32.

    Attributes:
        tokens: [T], of one slot after the other; SAMPLED_LAST where the device knows better.
        query_start_loc: [N + 1], where those of each slot begin. A slot may have none.
        context_lens: [N], the tokens of each sequence, those of the step included.
        block_tables: [N, pages of a sequence].
        rows: [R], the tokens after which one is sampled; T where there is none.
        drafts: [N], how many of the tokens of each slot, the last, are proposed.
        shift: [T], how many tokens each stands nearer to the text than its place in the cache says: none in a chain.
        ancestors: [T], of a token that is proposed which of these it follows, itself included: bit i for the i-th.
    """

    tokens: Any
    query_start_loc: Any
    context_lens: Any
    block_tables: Any
    rows: Any
    drafts: Any
    shift: Any
    ancestors: Any


class Cache(NamedTuple):
    """The pages of a layer [P, page, 2G, D], keys at even and values at odd places; scales [P, page, G] of int8."""

    pages: Array
    k_scale: Array | None = None
    v_scale: Array | None = None


class Rows(NamedTuple):
    """The ends [R] of what a step has computed: the logits [R, vocabulary] of what follows, and of which slot.

    `position` is that of the token that follows, and `slot` is N where there is none.
    """

    logits: Array
    position: Array
    slot: Array


def forward(
    decoder: Decoder, weights: Weights, caches: list[Cache], last: Array, x: Step, trees: bool
) -> tuple[list[Cache], Rows]:
    """The caches of the layers with the step's tokens in them, and what it came to; `last` [N] are tokens of slots.

    Without `trees` the drafts of every slot have to be a chain.
    """
    count, tokens = x.context_lens.shape[0], x.tokens.shape[0]
    slots = jnp.searchsorted(x.query_start_loc[1:], jnp.arange(tokens), side="right").astype(jnp.int32)
    slot = jnp.minimum(slots, count - 1)  # that of padding, which nobody sees, is anyone's
    places = jnp.maximum(x.context_lens[slot] - x.query_start_loc[slot + 1] + jnp.arange(tokens), 0)
    positions = places - x.shift if trees else places
    known = jnp.where(x.tokens == SAMPLED_LAST, last[slot], x.tokens)
    mask = draft_mask(x, slot) if trees else None

    def attend(q, k, v, window, cache):
        return _attend(x, slots, places, mask, q, k, v, cache, window=window, softcap=decoder.softcap)

    features, caches = hidden_states(decoder, weights, known, positions, attend, caches)
    row = jnp.minimum(x.rows, tokens - 1)
    rows = Rows(logits_of(weights, features[row]), positions[row] + 1, jnp.where(x.rows < tokens, slot[row], count))
    return caches, rows


def draft_mask(x: Step, slot: Array) -> Array:
    """Which of its slot's tokens in the step each token sees [T,T]: those before it, and of drafts its own path."""
    of_step = jnp.arange(x.tokens.shape[0], dtype=jnp.int32)
    drafts_from = (x.query_start_loc[1:] - x.query_start_loc[:-1] - x.drafts)[slot]
    draft = of_step[None] - drafts_from[:, None]
    is_ancestor = jnp.right_shift(x.ancestors[:, None], jnp.clip(draft, 0, MOST_DRAFTS)) & 1
    return jnp.where(draft < 0, of_step[None] <= (of_step - x.query_start_loc[slot])[:, None], is_ancestor == 1)


def choose(kind: Kind, last: Array, rows: Rows, sampling: SamplingArrays) -> tuple[Array, Array]:
    """The last tokens [N] of the slots after the step, and the tokens [R] that were sampled."""
    slot = jnp.minimum(rows.slot, last.shape[0] - 1)
    sampled = sample(rows.logits, rows.position, SamplingArrays(*(a[slot] for a in sampling)), kind)
    # Of a slot with drafts any of its rows may be the last here: its tokens are read before its next step.
    return last.at[rows.slot].set(sampled, mode="drop"), sampled


def empty_caches(decoder: Decoder, pages: int, page_size: int, dtype: Any, mesh: Mesh | None) -> list[Cache]:
    """Pages in `dtype` for each layer, where they will stay."""
    sharding = None if mesh is None else NamedSharding(mesh, P(None, None, HEADS))
    groups, scaled = decoder.kv_heads, jnp.dtype(dtype) == jnp.int8

    def cache() -> Cache:
        of_pages = jnp.zeros((pages, page_size, 2 * groups, decoder.head_dim), dtype, device=sharding)
        scales = (jnp.zeros((pages, page_size, groups), jnp.float32, device=sharding) for _ in "kv" * scaled)
        return Cache(of_pages, *scales)

    return [cache() for _ in decoder.windows]


# --- Attention over the pages -----------------------------------------------------------------------------------------


def _attend(
    x: Step, slots: Array, places: Array, mask: Array | None, q: Array, k: Array, v: Array, cache: Cache, **options: Any
):
    """o, and the cache with k and v; the operation writes them where they are not quantised and no mask is needed."""
    count = x.context_lens.shape[0]
    tables = (x.context_lens, x.block_tables, x.query_start_loc, count)
    if cache.pages.dtype == q.dtype and mask is None:
        o, pages = lax.ragged_page_attention_v3(q, k, v, cache.pages, *tables, **options)
        return o, Cache(pages)
    cache = _written(x, slots, places, k, v, cache)
    options |= dict(k_scale=cache.k_scale, v_scale=cache.v_scale, draft_mask=mask)
    return lax.ragged_page_attention(q, cache.pages, *tables, **options), cache


def _written(x: Step, slots: Array, places: Array, k: Array, v: Array, cache: Cache) -> Cache:
    """The cache with the keys and values of the step's tokens in its dtype; padding is written nowhere."""
    pages, page_size = cache.pages.shape[:2]
    count, column = x.context_lens.shape[0], jnp.minimum(places // page_size, x.block_tables.shape[1] - 1)
    page = jnp.where(slots < count, x.block_tables[jnp.minimum(slots, count - 1), column], pages)
    put = lambda into, new: into.at[page, places % page_size].set(new, mode="drop")
    interleaved = lambda k, v: jnp.stack([k, v], 2).reshape(k.shape[0], -1, k.shape[-1])
    if cache.k_scale is None:
        return Cache(put(cache.pages, _saturated(interleaved(k, v), cache.pages.dtype)))
    (k, k_scale), (v, v_scale) = _quantised(k), _quantised(v)
    return Cache(put(cache.pages, interleaved(k, v)), put(cache.k_scale, k_scale), put(cache.v_scale, v_scale))


def _saturated(x: Array, dtype: Any) -> Array:
    """The nearest number of a dtype that has no infinity."""
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32), -most, most).astype(dtype)


def _quantised(x: Array) -> tuple[Array, Array]:
    """[T,G,D] as int8, and the scale [T,G] of each token and head by which that is multiplied."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1) / 127
    return jnp.round(x / jnp.where(scale > 0, scale, 1.0)[..., None]).astype(jnp.int8), scale


# --- From requests to arrays ------------------------------------------------------------------------------------------


class Tables:
    """The arrays of all slots on the host, of which a step takes a copy."""

    def __init__(self, slots: int, pages_of_sequence: int) -> None:
        self._block_tables = np.zeros((slots, pages_of_sequence), np.int32)
        self._sampling = SamplingArrays(
            np.zeros(slots, np.float32),
            np.zeros(slots, np.int32),
            np.ones(slots, np.float32),
            np.zeros(slots, np.uint32),
        )

    def step(self, chunks: list[Chunk], bucket: int, rows: int) -> tuple[Step, list[int]]:
        """The step of these chunks, in the order of their slots, padded to its bucket; and the first row of each."""
        slots = self._block_tables.shape[0]
        tokens, shift, ancestors = (np.zeros(bucket, np.int32) for _ in range(3))
        sampled = np.full(rows, bucket, np.int32)
        lengths, context_lens, proposed = (np.zeros(slots, np.int32) for _ in range(3))
        at, row, first_rows = 0, 0, []
        for request, start, stop, drafts, samples in chunks:
            known = request.tokens[start:stop]
            count = len(drafts.tokens)
            new = [*known, *[SAMPLED_LAST] * (stop - start - len(known)), *drafts.tokens]
            tokens[at : at + len(new)] = new
            at += len(new)
            if not drafts.is_chain:
                shift[at - count : at] = np.arange(count) - drafts.depths
                ancestors[at - count : at] = drafts.ancestors
            slot = request.slot
            lengths[slot], context_lens[slot], proposed[slot] = len(new), stop + count, count
            self._write(request)
            first_rows.append(row)
            if samples:
                sampled[row : row + 1 + count] = np.arange(at - 1 - count, at)
                row += 1 + count
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tables = self._block_tables.copy()
        return Step(tokens, starts, context_lens, tables, sampled, proposed, shift, ancestors), first_rows

    def sampling(self) -> SamplingArrays:
        """How the sequences of all slots are sampled."""
        return SamplingArrays(*(array.copy() for array in self._sampling))

    def _write(self, request: Request) -> None:
        """Lists the pages of a sequence that its slot does not have yet."""
        listed = request.listed
        if listed == 0:
            for array, value in zip(self._sampling, request.sampling.of_arrays, strict=True):
                array[request.slot] = value
        if listed < len(request.pages):
            self._block_tables[request.slot, listed : len(request.pages)] = request.pages[listed:]
            request.listed = len(request.pages)
