"""Writes a step's keys and values into the pool in place, by copies within device memory.

Each token is one copy of the rows of its slot. If a step fills a page from its first slot to its last, the first token
is the copy of the whole page, and the other tokens make none.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .ragged import Step

# The most copies in flight.
IN_FLIGHT = 64


def write(x: Any, step: Step, name: str) -> Array:
    """The pool x.kv_pages [b,p,s,g,2,d] with x.k and x.v [b,t,g,d] in the slots of the step's tokens."""
    (b, pages, size, g, _, d), t = x.kv_pages.shape, x.k.shape[1]
    slot, slots = _destinations(x.block_tables, step, pages, size)
    new = jnp.stack([x.k, x.v], axis=3).reshape(b * t, 2 * g, d)
    pool, dtype = x.kv_pages.reshape(b * pages, size, 2 * g, d), x.kv_pages.dtype
    if dtype == jnp.float16:  # which Mosaic does not have
        new, pool = (lax.bitcast_convert_type(a, jnp.bfloat16) for a in (new, pool))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    written = pl.pallas_call(
        partial(_kernel, tokens=b * t, size=size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={3: 0},
        name=name,
    )(slot, slots, new, pool)
    return lax.bitcast_convert_type(written, dtype).reshape(x.kv_pages.shape)


def _destinations(block_tables: Array, step: Step, pages: int, size: int) -> tuple[Array, Array]:
    """The slot in the pools to which each token [b·t] is copied, and how many slots are: 0, 1 or a page."""
    (b, t), columns = step.position.shape, block_tables.shape[2]
    batch, token = jnp.arange(b, dtype=jnp.int32)[:, None], jnp.arange(t, dtype=jnp.int32)[None]
    position = jnp.where(step.valid, step.position, 0)
    column, place = position // size, position % size
    page = block_tables[batch, step.sequence, jnp.minimum(column, columns - 1)]
    written = step.valid & (column < columns) & (page >= 0) & (page < pages)
    last = jnp.minimum(token + size - 1, t - 1)
    fills = written & (place == 0) & step.valid[batch, last]
    fills &= (position[batch, last] == position + size - 1) & (step.sequence[batch, last] == step.sequence)
    begin = token - place
    is_filled = fills[batch, jnp.maximum(begin, 0)] & (begin >= 0)
    is_filled &= step.sequence[batch, jnp.maximum(begin, 0)] == step.sequence
    slots = jnp.where(fills, size, jnp.where(written & ~is_filled, 1, 0))
    slot = (batch * pages + page) * size + place
    return jnp.where(written, slot, 0).reshape(-1), slots.reshape(-1)


def _kernel(slot, slots, new, before, pool, semaphore, *, tokens: int, size: int):
    del before  # the same memory as the pool

    def for_copy(token, act):
        page, place = lax.div(slot[token], size), lax.rem(slot[token], size)

        @pl.when(slots[token] == 1)
        def _():
            act(pltpu.make_async_copy(new.at[token], pool.at[page, place], semaphore))

        if 1 < size <= tokens:

            @pl.when(slots[token] == size)
            def _():
                act(pltpu.make_async_copy(new.at[pl.ds(token, size)], pool.at[page], semaphore))

    def step(n, carry):
        @pl.when(n < tokens)
        def _():
            for_copy(jnp.minimum(n, tokens - 1), lambda copy: copy.start())

        @pl.when(n >= IN_FLIGHT)
        def _():
            for_copy(jnp.maximum(n - IN_FLIGHT, 0), lambda copy: copy.wait())

        return carry

    lax.fori_loop(0, tokens + IN_FLIGHT, step, 0)
