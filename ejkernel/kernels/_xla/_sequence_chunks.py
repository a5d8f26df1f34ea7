"""A recurrence over sequences, chunk by chunk or token by token, with a state carried from one to the next.

Tokens are one sequence, or several that `spans` [b?,n,2] divide them into, each with its own state. Derivatives store
the tokens and the initial state of each chunk and recompute the rest, so that memory is linear in the sequence at any
order of differentiation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.xla_utils.search import entries_until

from ._tiles import varying_like


class Chunks(NamedTuple):
    """The order in which tokens are computed: in chunks of one sequence each, of which the last may be partial.

    Three fields are for `spans` only.
    token: [b?,count·size] the token at each place, out of range for none.
    begins: [b?,count] the sequence that begins with a chunk, n if none does.
    last: [b?,n] the last chunk of a sequence, −1 if it is empty.
    """

    size: int
    count: int
    reverse: bool
    token: Array | None = None
    begins: Array | None = None
    last: Array | None = None


def chunks_of(spans: Array | None, length: int, size: int, reverse: bool = False) -> Chunks:
    """The chunks of `length` tokens, `size` tokens each; in reverse, the last token of a sequence comes first."""
    if spans is None:
        return Chunks(size, -(-length // size), reverse)
    count = (length + spans.shape[1] * (size - 1)) // size
    return Chunks(size, count, reverse, *jax.vmap(partial(_places, size, count, length, reverse))(spans))


def _places(size: int, count: int, length: int, reverse: bool, spans: Array) -> tuple[Array, Array, Array]:
    """`token`, `begins` and `last` for the spans of one batch element."""
    first, after = spans.T
    number = -(-(after - first) // size)
    end = jnp.cumsum(number, dtype=np.int32)
    chunk = jnp.arange(count, dtype=np.int32)
    sequence = entries_until(end, chunk)
    at = lambda a: jnp.take(a, sequence, mode="fill", fill_value=0)[:, None]
    place = (chunk[:, None] - at(end - number)) * size + jnp.arange(size, dtype=np.int32)[None]
    token = at(after) - 1 - place if reverse else at(first) + place
    nothing = length + jnp.arange(count * size, dtype=np.int32).reshape(count, size)
    token = jnp.where(place < at(after - first), token, nothing)
    begins = jnp.where(chunk == at(end - number)[:, 0], sequence, spans.shape[0])
    return token.reshape(-1), begins, jnp.where(number > 0, end - 1, -1)


def cut(a: Array, chunks: Chunks) -> Array:
    """[b,s,h,…] -> [count,b,h,size,…], 0 for places without a token."""
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
    """[count,b,h,size,…] -> [b,s,h,…], 0 for tokens of no chunk."""
    a = a.transpose(1, 0, 3, 2, *range(4, a.ndim))
    a = a.reshape(a.shape[0], -1, *a.shape[3:])
    if chunks.token is None:
        a = a[:, :length]
        return lax.rev(a, (1,)) if chunks.reverse else a
    token = jnp.broadcast_to(chunks.token, a.shape[:2])
    put = lambda a, token: (
        jnp.zeros_like(a, shape=(length, *a.shape[1:])).at[token].add(a, mode="drop", unique_indices=True)
    )
    return jax.vmap(put)(a, token)


def over_chunks(
    compute: Callable[[Array, Any], tuple[Array, Array]],
    states: Array,
    tokens: Any,
    spans: Array | None,
    size: int,
    reverse: bool = False,
) -> tuple[Array, Array]:
    """(o [b,s,h,…], final states [b,n,…]) of `compute`: (state, tokens of a chunk) -> (state after it, o [b,h,size,…]).

    Args:
        compute: the function of a chunk; its tokens are [b,h,size,…], with 0 for places without a token.
        states: [b,n,…], the initial states of the sequences.
        tokens: a tree of arrays [b,s,h,…], of at least one token.
        spans: [b?,n,2], the first token of each sequence and the one after its last; None for one of all tokens.
        size: tokens of a chunk.
        reverse: whether time runs from the last token of a sequence to its first.
    """
    length = jax.tree.leaves(tokens)[0].shape[1]
    chunks = chunks_of(spans, length, size, reverse)
    tokens = jax.tree.map(lambda a: cut(a, chunks), tokens)

    @jax.checkpoint
    def step(state, of_chunk):
        tokens, begins, initial = of_chunk
        if begins is not None:
            state = jnp.where(begins, initial, state)
        state, o = compute(state, tokens)
        return state, (o, None if begins is None else state)

    if spans is None:
        state, (o, _) = lax.scan(step, states[:, 0], (tokens, None, None))
        return joined(o, chunks, length), state[:, None]
    b, n = states.shape[:2]
    of_rows = lambda a: jnp.broadcast_to(a, (b, *a.shape[1:]))
    initial = jnp.moveaxis(_taken(states, of_rows(chunks.begins)), 1, 0)
    begins = lax.expand_dims(jnp.moveaxis(chunks.begins < n, 1, 0), range(2, states.ndim))
    _, (o, after) = lax.scan(step, jnp.zeros_like(states[:, 0]), (tokens, begins, initial))
    last = of_rows(chunks.last)
    final = _taken(jnp.moveaxis(after, 0, 1), jnp.where(last < 0, chunks.count, last))
    is_empty = lax.expand_dims(last < 0, range(2, states.ndim))
    return joined(o, chunks, length), jnp.where(is_empty, states, final)


def is_one_token(tokens: Array, spans: Array | None) -> bool:
    """Whether tokens [b,s,…] are a single one of a single sequence, as in a step of decoding."""
    return spans is None and tokens.shape[1] == 1


def over_one_token(
    step: Callable[[Array, Any], tuple[Array, Array]], states: Array, tokens: Any
) -> tuple[Array, Array]:
    """`over_chunks` for a single token, without a loop: `step` is (state, token [b,…]) -> (state after, o [b,…])."""
    state, o = step(states[:, 0], jax.tree.map(lambda a: a[:, 0], tokens))
    return o[:, None], state[:, None]


def over_tokens(
    step: Callable[[Array, Any], tuple[Array, Array]],
    states: Array,
    tokens: Any,
    spans: Array | None,
    reverse: bool = False,
) -> tuple[Array, Array]:
    """`over_chunks` token by token, for formulas: `step` is (state, a token [b,…]) -> (state after it, o [b,…]).

    Tokens of no sequence are replaced by 0, as they may hold NaN.
    """
    length = jax.tree.leaves(tokens)[0].shape[1]
    spans = jnp.array([[[0, length]]], np.int32) if spans is None else spans
    first, after = jnp.moveaxis(spans, -1, 0)[..., None]
    token = jnp.arange(length, dtype=np.int32)[None, None]
    owner = jnp.moveaxis((first <= token) & (token < after), 2, 0)  # [s,b?,n]
    in_sequence = jnp.moveaxis(owner.any(-1), 0, 1)
    shown = lambda a: jnp.where(lax.expand_dims(in_sequence, range(2, a.ndim)), a, 0)
    tokens = jax.tree.map(lambda a: jnp.moveaxis(shown(a), 1, 0), tokens)

    def of_owner(states, of_token):
        token, owner = of_token
        owner = lax.expand_dims(owner, range(2, states.ndim))
        h, o = step(jnp.where(owner, states, 0).sum(1), token)
        return jnp.where(owner, h[:, None], states), o

    states, o = lax.scan(of_owner, states, (tokens, owner), reverse=reverse)
    return jnp.moveaxis(o, 0, 1), states


def initial_states(
    operands: Any, given: Array | None, shape: tuple[int, ...], spans: Array | None, dtype: Any
) -> Array:
    """The initial states [b,n,…]: those given, or zeros; b is the batch size of the first operand."""
    if given is not None:
        return given.astype(dtype)
    sequences = 1 if spans is None else spans.shape[1]
    return varying_like(operands, lax.full((operands[0].shape[0], sequences, *shape), 0, dtype))


def _taken(states: Array, index: Array) -> Array:
    """states[b, index[b, i]], 0 for indices out of range."""
    return jax.vmap(lambda a, i: a.at[i].get(mode="fill", fill_value=0))(states, index)
