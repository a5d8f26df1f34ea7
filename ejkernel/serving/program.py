"""The program of a step: tokens of many sequences in, the next token of each of them out.

Its shapes are the bucket of the step and the limits of the engine, so that one program serves every mixture of prompts,
decode and drafts. The caches and the tokens that were sampled last are donated: both stay on the device, in place.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import lax
from .model import HEADS, Decoder, Weights, hidden_states, logits_of
from .sampling import SamplingArrays, sample

SAMPLED_LAST = -1
"""In the place of a token that no host has read yet: the one that was sampled last for its sequence."""


class Step(NamedTuple):
    """What a step computes, in slots that hold a sequence each. All but `sampling` is int32.

    Attributes:
        tokens: [T], of one slot after the other; SAMPLED_LAST where the device knows better.
        query_start_loc: [N + 1], where those of each slot begin. A slot may have none.
        context_lens: [N], the tokens of each sequence, those of the step included.
        block_tables: [N, pages of a sequence].
        rows: [R], the tokens after which one is sampled; T where there is none.
        sampling: of each slot.
    """

    tokens: Any
    query_start_loc: Any
    context_lens: Any
    block_tables: Any
    rows: Any
    sampling: SamplingArrays


class Cache(NamedTuple):
    """The pages of a layer [P, page, 2G, D], keys at even and values at odd places; scales [P, page, G] of int8."""

    pages: Array
    k_scale: Array | None = None
    v_scale: Array | None = None


class State(NamedTuple):
    """What stays on the device between steps: the caches of the layers, and the last sampled token of each slot."""

    caches: list[Cache]
    last: Array


def step(decoder: Decoder, weights: Weights, state: State, x: Step) -> tuple[State, Array]:
    """The state after the step, and the tokens [R] that were sampled."""
    count, tokens = x.context_lens.shape[0], x.tokens.shape[0]
    slots = jnp.searchsorted(x.query_start_loc[1:], jnp.arange(tokens), side="right").astype(jnp.int32)
    slot = jnp.minimum(slots, count - 1)  # that of padding, which nobody sees, is anyone's
    positions = jnp.maximum(x.context_lens[slot] - x.query_start_loc[slot + 1] + jnp.arange(tokens), 0)
    known = jnp.where(x.tokens == SAMPLED_LAST, state.last[slot], x.tokens)

    def attend(q, k, v, window, cache):
        return _attend(x, slots, positions, q, k, v, cache, window=window, softcap=decoder.softcap)

    features, caches = hidden_states(decoder, weights, known, positions, attend, state.caches)
    row = jnp.minimum(x.rows, tokens - 1)
    of_rows = SamplingArrays(*(a[slot[row]] for a in x.sampling))
    sampled = sample(logits_of(weights, features[row]), positions[row] + 1, of_rows)
    # Of a slot with drafts any of its rows may be the last here: its tokens are read before its next step.
    last = state.last.at[jnp.where(x.rows < tokens, slot[row], count)].set(sampled, mode="drop")
    return State(caches, last), sampled


def initial_state(decoder: Decoder, pages: int, page_size: int, slots: int, dtype: Any, mesh: Mesh | None) -> State:
    """Empty pages of a cache in `dtype`, where they will stay."""
    sharding = lambda *spec: None if mesh is None else NamedSharding(mesh, P(*spec))
    zeros = lambda shape, dtype, *spec: jnp.zeros(shape, dtype, device=sharding(*spec))
    shape, groups = (pages, page_size, 2 * decoder.kv_heads, decoder.head_dim), decoder.kv_heads

    def cache() -> Cache:
        of_pages = zeros(shape, dtype, None, None, HEADS)
        if jnp.dtype(dtype) != jnp.int8:
            return Cache(of_pages)
        return Cache(of_pages, *(zeros((pages, page_size, groups), jnp.float32, None, None, HEADS) for _ in "kv"))

    return State([cache() for _ in decoder.windows], zeros((slots,), jnp.int32))


# --- Attention over the pages -----------------------------------------------------------------------------------------


def _attend(x: Step, slots: Array, positions: Array, q: Array, k: Array, v: Array, cache: Cache, **options: Any):
    """o, and the cache with k and v, which the operation writes itself where they are not quantised."""
    count = x.context_lens.shape[0]
    tables = (x.context_lens, x.block_tables, x.query_start_loc, count)
    if cache.pages.dtype == q.dtype:
        o, pages = lax.ragged_page_attention_v3(q, k, v, cache.pages, *tables, **options)
        return o, Cache(pages)
    cache = _written(x, slots, positions, k, v, cache)
    o = lax.ragged_page_attention(q, cache.pages, *tables, k_scale=cache.k_scale, v_scale=cache.v_scale, **options)
    return o, cache


def _written(x: Step, slots: Array, positions: Array, k: Array, v: Array, cache: Cache) -> Cache:
    """The cache with the quantised keys and values of the step's tokens; padding is written nowhere."""
    pages, page_size = cache.pages.shape[:2]
    count, column = x.context_lens.shape[0], jnp.minimum(positions // page_size, x.block_tables.shape[1] - 1)
    page = jnp.where(slots < count, x.block_tables[jnp.minimum(slots, count - 1), column], pages)
    put = lambda into, new: into.at[page, positions % page_size].set(new, mode="drop")
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

    def __init__(self, slots: int, pages_of_sequence: int):
        self.block_tables = np.zeros((slots, pages_of_sequence), np.int32)
        self.sampling = SamplingArrays(
            np.zeros(slots, np.float32),
            np.zeros(slots, np.int32),
            np.ones(slots, np.float32),
            np.zeros(slots, np.uint32),
        )

    def step(self, chunks: list[Any], bucket: int, rows: int) -> tuple[Step, list[int]]:
        """The step of these chunks, in the order of their slots, padded to its bucket; and the first row of each."""
        slots = self.block_tables.shape[0]
        tokens, sampled = np.zeros(bucket, np.int32), np.full(rows, bucket, np.int32)
        lengths, context_lens = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        at, row, first_rows = 0, 0, []
        for request, start, stop, drafts, samples in chunks:
            known = request.tokens[start:stop]
            new = [*known, *[SAMPLED_LAST] * (stop - start - len(known)), *drafts]
            tokens[at : at + len(new)] = new
            at += len(new)
            slot = request.slot
            lengths[slot], context_lens[slot] = len(new), stop + len(drafts)
            self.block_tables[slot, : len(request.pages)] = request.pages
            for array, value in zip(self.sampling, request.sampling.of_arrays, strict=True):
                array[slot] = value
            first_rows.append(row)
            if samples:
                count = 1 + len(drafts)
                sampled[row : row + count] = np.arange(at - count, at)
                row += count
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        copies = (self.block_tables.copy(), sampled, jax.tree.map(np.copy, self.sampling))
        return Step(tokens, starts, context_lens, *copies), first_rows
