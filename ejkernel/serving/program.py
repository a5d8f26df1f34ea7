"""The program of a step: the forward of tokens of many sequences, and the sampling of their next tokens.

Its shapes are the bucket of the step and the limits of the engine, so that one program computes every mixture of
prompts, decode and drafts. It takes the most likely tokens; a small second program samples others. The caches and the
last sampled tokens are donated, so that they are updated in place.
"""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from .. import lax
from .model import HEADS, Decoder, Weights, hidden_states, logits_of
from .sampling import Kind, SamplingArrays, sample
from .scheduler import Chunk, Request

MOST_DRAFTS = 31
"""The largest number of drafts in a tree, as the ancestors of each are bits of an int32."""
SAMPLED_LAST = -1
"""Stands for the last sampled token of the sequence, which the host has not read yet."""
OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""Of XLA: products are those of cuBLAS, which reads weights for few rows faster than XLA's own kernels."""


class Step(NamedTuple):
    """The inputs of a step, all int32. Each of N batch slots has a sequence or none.

    Attributes:
        tokens: [T], those of one slot after those of another; SAMPLED_LAST for a token that only the device has.
        query_start_loc: [N + 1], where the tokens of each slot begin. A slot may have none.
        context_lens: [N], the tokens of each sequence, those of the step included.
        block_tables: [N, pages of a sequence].
        rows: [R], the indices of tokens after which one is sampled; T for unused rows.
        drafts: [N], how many of the last tokens of each slot are drafts.
        shift: [T], slot of the cache minus position of each token, which is not 0 for drafts beside the first path.
        ancestors: [T], the bit set of the drafts that a draft follows, itself included: bit i for draft i. Only
            `forward` with `trees` reads it, and `shift`.
    """

    tokens: Any
    query_start_loc: Any
    context_lens: Any
    block_tables: Any
    rows: Any
    drafts: Any
    shift: Any
    ancestors: Any


class Sizes(NamedTuple):
    """The static sizes of a step: T tokens, R rows, N slots, and the pages of a sequence."""

    tokens: int
    rows: int
    slots: int
    pages: int

    @property
    def shapes(self) -> Step:
        """The shapes of its inputs."""
        tokens, rows, slots, pages = self
        return Step((tokens,), (slots + 1,), (slots,), (slots, pages), (rows,), (slots,), (tokens,), (tokens,))

    @property
    def total(self) -> int:
        """The number of all its integers."""
        return sum(map(math.prod, self.shapes))

    def inputs_in(self, flat: Any) -> Step:
        """The inputs of a step as parts of one array [total], as which they are sent to the device."""
        ends = itertools.accumulate(map(math.prod, self.shapes))
        parts = (
            flat[end - math.prod(shape) : end].reshape(shape) for end, shape in zip(ends, self.shapes, strict=True)
        )
        return Step(*parts)


class Cache(NamedTuple):
    """The pages of a layer [P, page, 2G, D], keys at even and values at odd indices; scales [P, page, G] for int8."""

    pages: Array
    k_scale: Array | None = None
    v_scale: Array | None = None


class Rows(NamedTuple):
    """The R tokens after which one is sampled: the logits [R, vocabulary] of the next token, its position and its slot.

    `slot` is N for unused rows.
    """

    logits: Array
    position: Array
    slot: Array


def forward(
    decoder: Decoder, weights: Weights, caches: list[Cache], last: Array, x: Step, trees: bool
) -> tuple[list[Cache], Rows]:
    """The caches of the layers with the step's tokens, and the rows to sample from.

    `last` [N] are the last sampled tokens of the slots. Without `trees` the drafts of every slot have to be a chain.
    """
    count, tokens = x.context_lens.shape[0], x.tokens.shape[0]
    slots = jnp.searchsorted(x.query_start_loc[1:], jnp.arange(tokens), side="right", method="compare_all")
    slot = jnp.minimum(slots, count - 1)  # any slot for padding, whose results are not used
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
    """[T,T]: which tokens of its slot in the step each token sees: those before it; for a draft, those on its path."""
    of_step = jnp.arange(x.tokens.shape[0], dtype=jnp.int32)
    drafts_from = (x.query_start_loc[1:] - x.query_start_loc[:-1] - x.drafts)[slot]
    draft = of_step[None] - drafts_from[:, None]
    is_ancestor = jnp.right_shift(x.ancestors[:, None], jnp.clip(draft, 0, MOST_DRAFTS)) & 1
    return jnp.where(draft < 0, of_step[None] <= (of_step - x.query_start_loc[slot])[:, None], is_ancestor == 1)


def choose(kind: Kind, last: Array, rows: Rows, sampling: SamplingArrays | None) -> tuple[Array, Array]:
    """The last sampled tokens [N] of the slots after the step, and the tokens [R] that it sampled.

    `sampling` is None for the greedy ones, which are the program of the forward's.
    """
    slot = jnp.minimum(rows.slot, last.shape[0] - 1)
    of_rows = sampling and SamplingArrays(*(a[slot] for a in sampling))
    sampled = sample(rows.logits, rows.position, of_rows, kind)
    # A slot with drafts has several rows, any of which may win here: the host reads its tokens before its next step.
    return last.at[rows.slot].set(sampled, mode="drop"), sampled


def empty_caches(decoder: Decoder, pages: int, page_size: int, dtype: Any, mesh: Mesh | None) -> list[Cache]:
    """Pages of zeros in `dtype` for each layer, on the devices that hold them."""
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
    """o, and the cache with k and v; the operation writes them itself unless they are quantised or need a mask."""
    count = x.context_lens.shape[0]
    tables = (x.context_lens, x.block_tables, x.query_start_loc, count)
    if cache.pages.dtype == q.dtype and mask is None:
        o, pages = lax.ragged_page_attention_v3(q, k, v, cache.pages, *tables, **options)
        return o, Cache(pages)
    cache = _written(x, slots, places, k, v, cache)
    options |= dict(k_scale=cache.k_scale, v_scale=cache.v_scale, draft_mask=mask)
    return lax.ragged_page_attention(q, cache.pages, *tables, **options), cache


def _written(x: Step, slots: Array, places: Array, k: Array, v: Array, cache: Cache) -> Cache:
    """The cache with the keys and values of the step's tokens in its dtype; padding is not written."""
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
    """x in a dtype, clipped to its largest finite number."""
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32), -most, most).astype(dtype)


def _quantised(x: Array) -> tuple[Array, Array]:
    """x [T,G,D] as int8, and the scale [T,G] of each token and head: x ≈ int8 · scale."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1) / 127
    return jnp.round(x / jnp.where(scale > 0, scale, 1.0)[..., None]).astype(jnp.int8), scale


# --- From requests to arrays ------------------------------------------------------------------------------------------


class Tables:
    """The arrays of all slots on the host; each step gets a copy. `sharding` is that of the arrays on the device."""

    def __init__(self, slots: int, pages_of_sequence: int, sharding: Sharding | None) -> None:
        self._block_tables = np.zeros((slots, pages_of_sequence), np.int32)
        self._sharding = sharding
        self._on_device: SamplingArrays | None = None
        self._sampling = SamplingArrays(
            np.zeros(slots, np.float32),
            np.zeros(slots, np.int32),
            np.ones(slots, np.float32),
            np.zeros(slots, np.uint32),
        )

    def step(self, chunks: list[Chunk], sizes: Sizes, trees: bool = False) -> tuple[np.ndarray, list[int]]:
        """The inputs of a step, of chunks that are ordered by slot, in one array; and the first row of each chunk.

        With `trees` all drafts have ancestors, those of a chain too, which the mask of the step is made of.
        """
        inputs = np.zeros(sizes.total, np.int32)
        x = sizes.inputs_in(inputs)
        tokens, rows, first_rows, of_slots = [], [], [], []
        for request, start, stop, drafts, end, samples in chunks:
            known = request.tokens[start:stop]
            tokens += known
            if len(known) < stop - start:
                tokens += [SAMPLED_LAST] * (stop - start - len(known))
            if count := end - stop:
                at = slice(len(tokens), len(tokens) + count)
                tokens += drafts.tokens
                if trees:
                    x.shift[at], x.ancestors[at] = np.arange(count) - drafts.depths, drafts.ancestors
            of_slots.append((request.slot, end - start, end, count))
            if request.listed < len(request.pages):
                self._write(request)
            first_rows.append(len(rows))
            if samples:
                rows += range(len(tokens) - 1 - count, len(tokens))
        x.tokens[: len(tokens)], x.rows[:] = tokens, sizes.tokens
        x.rows[: len(rows)] = rows
        slot, length, context_len, proposed = np.array(of_slots, np.int32).reshape(-1, 4).T
        x.query_start_loc[slot + 1], x.context_lens[slot], x.drafts[slot] = length, context_len, proposed
        np.cumsum(x.query_start_loc, out=x.query_start_loc)
        x.block_tables[:] = self._block_tables
        return inputs, first_rows

    def sampling(self) -> SamplingArrays:
        """The sampling parameters of all slots, on the device; they are sent when one of them has changed."""
        if self._on_device is None:
            copies = SamplingArrays(*(array.copy() for array in self._sampling))
            self._on_device = jax.device_put(copies, self._sharding)
        return self._on_device

    def _write(self, request: Request) -> None:
        """Writes the new pages of a request to the block table of its slot; if it is new, also how it is sampled."""
        listed = request.listed
        if listed == 0:
            self._on_device = None
            for array, value in zip(self._sampling, request.sampling.of_arrays, strict=True):
                array[request.slot] = value
        self._block_tables[request.slot, listed : len(request.pages)] = request.pages[listed:]
        request.listed = len(request.pages)
