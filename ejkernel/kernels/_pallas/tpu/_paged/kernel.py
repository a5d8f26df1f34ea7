"""The kernel of attention over a cache: each work item in turn, with an online softmax over its blocks of keys.

Per query: maximum m, denominator l and accumulator a over the blocks so far. A block of logits s moves them to

    m' = max(m, max s);   l' = l·exp(m − m') + Σ exp(s − m');   a' = a·exp(m − m') + Σ exp(s − m')·v

and in the end o = a / l, lse = m + log l; sinks join both as one more logit, which has no value. While a block is
computed the next is copied to the other of two buffers: that of this work item, or the first of the next one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.primitives._pages import CacheSpec

from ..flash_attention.launch import VMEM_BYTES
from ..flash_attention.tiles import MASKED, contract, tanh
from .cache import LANES, Cache
from .work import WorkItem, blocks_of, count_of, item_at

BUFFERS = 2
# Rows of tiles, of several heads, that are computed without a loop.
ROWS_AT_ONCE = 128


class Inputs(NamedTuple):
    """The arrays of a call; None where absent.

    Attributes:
        q: query tiles [tiles, g, m, d], sorted as by `tiles.tiles_of`.
        caches: one of latents, or of keys and values in turn, or one of each, [pieces, s, rows, features]; one row has
            no axis.
        sinks: [b?, g, m, 128] float32: the logsumexp of each row's.
        drafts: [tiles, m, w] bfloat16: 1 where a row sees the new token w of its sequence, else 0.
        k_scale, v_scale: factors of keys and values [b?, g?] float32.
        table: block tables, row after row; None where the pieces of a sequence lie side by side.
    """

    q: Any
    caches: tuple[Any, ...]
    sinks: Any = None
    drafts: Any = None
    k_scale: Any = None
    v_scale: Any = None
    table: Any = None


@dataclass(frozen=True)
class Problem:
    """What a kernel is written for.

    Attributes:
        spec: what is computed.
        caches: that of keys and that of values, or of both, or of latents.
        group: query heads of a key/value head.
        tokens: of a tile.
        columns: pages of a row of the block tables, or pieces of a sequence where there are none.
        pages: of a pool.
        pieces: of a page.
        pool: pieces of a pool, where each batch element has its own; 0 where all have one.
        latent: how many of the first features of a key are its value; 0 where values are stored.
    """

    spec: CacheSpec
    caches: tuple[Cache, ...]
    group: int
    tokens: int
    columns: int
    pages: int = 0
    pieces: int = 1
    pool: int = 0
    latent: int = 0

    @property
    def keys(self) -> int:
        """Of a block."""
        return self.caches[0].slots

    @property
    def rows_of_head(self) -> int:
        """Of a slot of the cache of keys: with one of both each head has two."""
        return 2 if len(self.caches) == 1 and not self.latent else 1

    @property
    def values(self) -> int:
        """Features of values."""
        return self.latent or self.caches[-1].features

    @property
    def value_parts(self) -> list[slice]:
        """The features of values, as they are loaded."""
        return [slice(0, self.latent)] if self.latent else self.caches[-1].parts


def heads_at_once(heads: int, rows: int) -> int:
    """Heads of tiles of so many rows whose code stands side by side."""
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * rows <= ROWS_AT_ONCE))


class Outputs(NamedTuple):
    """Of each tile o [g, m, e] and lse [g, m]."""

    o: Any
    lse: Any


class State(NamedTuple):
    """m and l [g, m, 128], the same number in all lanes, a [g, m, e], float32.

    Where tiles are large, keys and values of a block too, [g, parts, keys, width].
    """

    maximum: Any
    total: Any
    weighted: Any
    keys: Any = None
    values: Any = None


def attend(items: jax.Array, x: Inputs, problem: Problem, name: str) -> Outputs:
    """o [tiles, g, m, e] and lse [tiles, g, m] float32; of tokens of no item they are anything."""
    tiles, heads, rows, features = x.q.shape
    values = problem.values
    scalars = [items] if x.table is None else [items, x.table]
    of_tile = lambda i, items, *_: (item_at(items, i).tile, 0, 0, 0)
    of_lse = lambda i, items, *_: (item_at(items, i).tile, 0, 0)
    of_batch = lambda i, items, *_: (item_at(items, i).batch if x.sinks.shape[0] > 1 else 0, 0, 0, 0)
    in_smem, in_hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
    vmem = partial(pltpu.VMEM, dtype=jnp.float32)
    sorted_by_heads = [
        pltpu.VMEM((heads, len(cache.parts), cache.slots, cache.width), x.q.dtype)
        for cache in (problem.caches[0], problem.caches[-1])
    ]
    specs = Inputs(
        pl.BlockSpec((None, heads, rows, features), of_tile),
        tuple(in_hbm for _ in x.caches),
        None if x.sinks is None else pl.BlockSpec((None, heads, rows, LANES), of_batch),
        None if x.drafts is None else pl.BlockSpec((None, *x.drafts.shape[1:]), of_lse),
        None if x.k_scale is None else in_smem,
        None if x.v_scale is None else in_smem,
    )
    return pl.pallas_call(
        partial(_kernel, problem=problem, scalars=len(scalars)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count_of(items),),
            in_specs=[specs],
            out_specs=[
                Outputs(
                    pl.BlockSpec((None, heads, rows, values), of_tile),
                    pl.BlockSpec((None, heads, rows), of_lse),
                )
            ],
            scratch_shapes=[
                State(
                    vmem((heads, rows, LANES)),
                    vmem((heads, rows, LANES)),
                    vmem((heads, rows, values)),
                    *(sorted_by_heads if heads_at_once(heads, rows) < heads else ()),
                ),
                tuple(cache.buffers(BUFFERS) for cache in problem.caches),
                tuple(pltpu.SemaphoreType.DMA((BUFFERS,)) for _ in problem.caches),
            ],
        ),
        out_shape=[
            Outputs(
                jax.ShapeDtypeStruct((tiles, heads, rows, values), x.q.dtype),
                jax.ShapeDtypeStruct((tiles, heads, rows), jnp.float32),
            )
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        name=name,
    )(*scalars, x._replace(table=None))[0]


def _kernel(*refs, problem: Problem, scalars: int):
    (items, *tables), (x, out, state, buffers, semaphores) = refs[:scalars], refs[scalars:]
    step, count = pl.program_id(0), count_of(items)
    item = item_at(items, step)
    blocks = blocks_of(item.first, item.stop, problem.keys)
    copying = x.caches, buffers, semaphores, tables[0] if tables else None, problem

    def start(number, block, slot):
        @pl.when(number < count)
        def _():
            _for_copies(*copying, item_at(items, number), block, slot, lambda copy: copy.start())

    @pl.when(step == 0)
    def _():
        start(jnp.where(blocks > 0, 0, item.following), 0, 0)

    state.maximum[...] = jnp.full_like(state.maximum, MASKED)
    state.total[...] = jnp.zeros_like(state.total)
    state.weighted[...] = jnp.zeros_like(state.weighted)

    def of_block(block, carry):
        slot = lax.rem(item.before + block, BUFFERS)
        is_last = block == blocks - 1
        start(jnp.where(is_last, item.following, step), jnp.where(is_last, 0, block + 1), 1 - slot)
        _wait(*copying, item, block, slot)
        _accumulate(x, buffers, state, item, block, slot, problem)
        return carry

    lax.fori_loop(0, blocks, of_block, 0)

    @pl.when(item.begin < item.end)
    def _():
        _write(x, out, state, item, problem)


def _for_copies(caches, buffers, semaphores, table, problem: Problem, item: WorkItem, block, slot, act: Callable):
    """`act(copy)` for those pieces of a block of a work item that hold keys which it sees."""
    begin = (lax.div(item.first, problem.keys) + block) * problem.caches[0].pieces
    start, stop = _pieces(item, block, problem)

    def of_piece(place, carry):
        column = begin + place
        if table is None:
            where = item.sequence * problem.columns + column
        else:
            page = table[item.sequence * problem.columns + lax.div(column, problem.pieces)]
            page = jnp.clip(page, 0, problem.pages - 1)
            where = item.batch * problem.pool + page * problem.pieces + lax.rem(column, problem.pieces)
        for cache, stored, buffer, semaphore in zip(problem.caches, caches, buffers, semaphores, strict=True):
            for copy in cache.copies(stored, buffer, semaphore, slot, where, place):
                act(copy)
        return carry

    lax.fori_loop(start, stop, of_piece, 0)


def _pieces(item: WorkItem, block, problem: Problem) -> tuple[Any, Any]:
    """Which pieces of a block hold keys that a work item sees: start ≤ n < stop."""
    piece, pieces = problem.caches[0].piece, problem.caches[0].pieces
    begin = (lax.div(item.first, problem.keys) + block) * pieces
    first, stop = lax.div(item.first, piece), lax.div(item.stop + (piece - 1), piece)
    return jnp.maximum(first - begin, 0), jnp.minimum(stop - begin, pieces)


def _wait(caches, buffers, semaphores, table, problem: Problem, item: WorkItem, block, slot):
    """Until a block has been copied: a semaphore counts bytes, so a whole block is waited for at once."""
    start, stop = _pieces(item, block, problem)
    is_whole = stop - start == problem.caches[0].pieces

    @pl.when(is_whole)
    def _():
        for buffer, semaphore in zip(buffers, semaphores, strict=True):
            pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], semaphore.at[slot]).wait()

    @pl.when(jnp.logical_not(is_whole))
    def _():
        _for_copies(caches, buffers, semaphores, table, problem, item, block, slot, lambda copy: copy.wait())


def _accumulate(x: Inputs, buffers, state: State, item: WorkItem, block, slot, problem: Problem):
    """The online softmax of all heads with a block of keys.

    The code of a few small tiles stands side by side, for the compiler to interleave. Larger ones are computed in a
    loop, before which keys and values are sorted by heads: what begins at a row that is not known has no stride.
    """
    heads, rows, _ = x.q.shape
    begin = (lax.div(item.first, problem.keys) + block) * problem.keys
    key = begin + lax.broadcasted_iota(jnp.int32, (problem.keys, 1), 0)
    in_context = (key >= item.first) & (key < item.stop)
    loaders = [
        cache.loader(buffer, slot, in_context, x.q.dtype) for cache, buffer in zip(problem.caches, buffers, strict=True)
    ]
    visible = _visible(x.drafts, item, begin, rows, problem)

    def of_head(g, keys, values):
        factor = _factor(x.k_scale, item, g, problem.spec.softmax_scale)
        _accumulate_head(x.q, state, g, keys, values, visible, factor, problem)

    of_keys = lambda g, part: loaders[0](g * problem.rows_of_head, part)
    of_values = lambda g, part: loaders[-1]((g + 1) * problem.rows_of_head - 1, part)
    if problem.latent:
        of_values = lambda g, part: of_keys(g, part)[:, : problem.latent]
    if state.keys is None:
        for g in range(heads):
            of_head(g, partial(of_keys, g), partial(of_values, g))
        return
    for g in range(heads):
        for sorted_by_heads, load in ((state.keys, of_keys), (state.values, of_values)):
            for part in range(sorted_by_heads.shape[1]):
                sorted_by_heads[g, part] = load(g, part)
    count = heads_at_once(heads, rows)

    def of_heads(n, carry):
        for g in range(count):
            g = n * count + g
            of_head(g, lambda part, g=g: state.keys[g, part], lambda part, g=g: state.values[g, part])
        return carry

    lax.fori_loop(0, heads // count, of_heads, 0)


def _accumulate_head(q, state: State, g, keys: Callable, values: Callable, visible, factor, problem: Problem):
    """That of head g, whose keys and values in a part of the features the two functions load."""
    rows, softcap = q.shape[1], problem.spec.softcap
    products = [contract(q[g, :, part], keys(n), (1, 1)) for n, part in enumerate(problem.caches[0].parts)]
    s = sum(products[1:], products[0]) * factor
    if softcap is not None:
        s = softcap * tanh(s * (1 / softcap), softcap)
    s = jnp.where(visible, s, MASKED)
    before = state.maximum[g, :, :1]
    maximum = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
    weights, rescale = jnp.exp(s - maximum), jnp.exp(before - maximum)
    total = state.total[g, :, :1] * rescale + jnp.sum(weights, axis=1, keepdims=True)
    state.maximum[g] = jnp.broadcast_to(maximum, (rows, LANES))
    state.total[g] = jnp.broadcast_to(total, (rows, LANES))
    for n, part in enumerate(problem.value_parts):
        product = contract(weights.astype(q.dtype), values(n), (1, 0))
        state.weighted[g, :, part] = state.weighted[g, :, part] * rescale + product


def _visible(drafts, item: WorkItem, begin, rows: int, problem: Problem) -> jax.Array:
    """Which row sees which key of a block that begins with the key `begin`, bool [rows, keys]."""
    shape = (rows, problem.keys)
    key = begin + lax.broadcasted_iota(jnp.int32, shape, 1)
    visible = (key >= item.first) & (key < item.stop)
    if drafts is not None:
        width = drafts.shape[1]
        new = begin - item.cached + lax.broadcasted_iota(jnp.int32, (problem.keys, width), 0)
        is_draft = new == lax.broadcasted_iota(jnp.int32, (problem.keys, width), 1)
        told = contract(drafts[...], is_draft.astype(jnp.float32).astype(drafts.dtype), (1, 1))
        visible &= (key < item.cached) | (told > 0.5)
    if problem.tokens == 1:
        return visible
    position = item.position + _token_of(lax.broadcasted_iota(jnp.int32, shape, 0), problem)
    if drafts is None:
        visible &= key <= position
    return visible if problem.spec.window is None else visible & (key > position - problem.spec.window)


def _token_of(row: jax.Array, problem: Problem) -> jax.Array:
    """⌊row / group⌋ for rows of a tile: the vector unit divides no integers, and halves are far from rounding up."""
    return ((row.astype(jnp.float32) + 0.5) * (1 / problem.group)).astype(jnp.int32)


def _factor(scale, item: WorkItem, g: int, static: float):
    """The factor of head g, [b?, g?] in scalar memory, times a static one."""
    if scale is None:
        return static
    return static * scale[item.batch if scale.shape[0] > 1 else 0, g if scale.shape[1] > 1 else 0]


def _write(x: Inputs, out: Outputs, state: State, item: WorkItem, problem: Problem):
    """o and lse of the tokens of a work item; those of others in the tile stay."""
    heads, rows, _ = x.q.shape
    ours = lambda axis, shape: _of_item(lax.broadcasted_iota(jnp.int32, shape, axis), item, problem)
    for g in range(heads):
        maximum, total = state.maximum[g, :, :1], state.total[g, :, :1]
        weight = jnp.where(maximum > MASKED, 1.0, 0.0)
        is_some = maximum > MASKED
        if x.sinks is not None:
            sink = x.sinks[g, :, :1]
            with_sink = jnp.maximum(maximum, sink)
            weight *= jnp.exp(maximum - with_sink)
            total = total * weight + jnp.exp(sink - with_sink)
            maximum, is_some = with_sink, is_some | (sink > MASKED)
        # A fully masked row has masked logits alone, each with a weight of 1, or no block at all.
        factor = weight * _factor(x.v_scale, item, g, 1.0) / total
        o = jnp.where(weight > 0, state.weighted[g] * factor, 0).astype(out.o.dtype)
        lse = jnp.where(is_some, maximum + jnp.log(total), -jnp.inf)
        lse = jnp.broadcast_to(lse, (rows, LANES)).T[:1]
        if problem.tokens > 1:
            o = jnp.where(ours(0, o.shape), o.astype(jnp.float32), out.o[g].astype(jnp.float32)).astype(o.dtype)
            lse = jnp.where(ours(1, lse.shape), lse, out.lse[g : g + 1])
        out.o[g] = o
        out.lse[g : g + 1] = lse


def _of_item(row: jax.Array, item: WorkItem, problem: Problem) -> jax.Array:
    """Whether rows of a tile are those of its tokens."""
    return (row >= item.begin * problem.group) & (row < item.end * problem.group)
