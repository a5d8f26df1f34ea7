"""Chunks of tokens, each of one sequence, in the order in which a linear recurrence computes them."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.primitives._recurrence import Operands, RecurrenceSpec


class Chunks(NamedTuple):
    """The order in which tokens are computed: chunks, each of one sequence, whose last one may not be full.

    For `spans` only: token [b?,count·size], a number past the last token where there is none; begins [b?,count], the
    sequence that begins with a chunk, n if none does; last [b?,n], the last chunk of a sequence, −1 if it is empty.
    """

    size: int
    count: int
    reverse: bool
    token: Array | None = None
    begins: Array | None = None
    last: Array | None = None


def chunks_of(x: Operands, spec: RecurrenceSpec, size: int) -> Chunks:
    """Those of a call, of `size` tokens each."""
    length = x.q.shape[1]
    if x.spans is None:
        return Chunks(size, -(-length // size), spec.reverse)
    number = x.spans.shape[1]
    count = (length + number * (size - 1)) // size
    return Chunks(size, count, spec.reverse, *jax.vmap(partial(_places, size, count, length, spec.reverse))(x.spans))


def _places(size: int, count: int, length: int, reverse: bool, spans: Array) -> tuple[Array, Array, Array]:
    """token, begins and last of one row."""
    first, after = spans.T
    number = -(-(after - first) // size)
    end = jnp.cumsum(number, dtype=np.int32)
    chunk = jnp.arange(count, dtype=np.int32)
    sequence = jnp.searchsorted(end, chunk, side="right").astype(np.int32)
    at = lambda a: jnp.take(a, sequence, mode="fill", fill_value=0)[:, None]
    place = (chunk[:, None] - at(end - number)) * size + jnp.arange(size, dtype=np.int32)[None]
    token = at(after) - 1 - place if reverse else at(first) + place
    nothing = length + jnp.arange(count * size, dtype=np.int32).reshape(count, size)
    token = jnp.where(place < at(after - first), token, nothing)
    begins = jnp.where(chunk == at(end - number)[:, 0], sequence, spans.shape[0])
    return token.reshape(-1), begins, jnp.where(number > 0, end - 1, -1)


def cut(a: Array, chunks: Chunks) -> Array:
    """[b,s,h,…] -> [count,b,h,size,…], 0 where there is no token."""
    size, count, reverse, token, *_ = chunks
    if token is None:
        a = lax.rev(a, (1,)) if reverse else a
        a = lax.pad(a, np.array(0, a.dtype), [(0, count * size - n if i == 1 else 0, 0) for i, n in enumerate(a.shape)])
    else:
        token = jnp.broadcast_to(token, (a.shape[0], count * size))
        a = jax.vmap(lambda a, token: a.at[token].get(mode="fill", fill_value=0, unique_indices=True))(a, token)
    a = a.reshape(a.shape[0], count, size, *a.shape[2:])
    return a.transpose(1, 0, 3, 2, *range(4, a.ndim))


def joined(a: Array, chunks: Chunks, length: int) -> Array:
    """[count,b,h,size,e] -> [b,s,h,e], 0 for tokens of no chunk."""
    a = a.transpose(1, 0, 3, 2, 4)
    a = a.reshape(a.shape[0], -1, *a.shape[3:])
    if chunks.token is None:
        a = a[:, :length]
        return lax.rev(a, (1,)) if chunks.reverse else a
    token = jnp.broadcast_to(chunks.token, a.shape[:2])
    put = lambda a, token: (
        jnp.zeros_like(a, shape=(length, *a.shape[1:])).at[token].add(a, mode="drop", unique_indices=True)
    )
    return jax.vmap(put)(a, token)
