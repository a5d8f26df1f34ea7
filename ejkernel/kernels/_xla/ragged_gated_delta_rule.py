"""The gated delta rule over a step's tokens in XLA: sequences of one token by its step, the others chunk by chunk.

The equations are those of `gated_delta_rule`. Sequences of one token are computed all at once, except on a CPU, where
a loop replaces one state after the other in its place: this is an eighth of the time of gathering all states and
scattering them. The loop over chunks has as many steps as the longer sequences need, none in a step of decoding.
"""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.kernels._ragged_gated_delta_rule import Sequences, as_one_step, sequences_of
from ejkernel.kernels._registry import configured_by, kernel_registry
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec
from ejkernel.primitives.ragged_gated_delta_rule import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.recurrence import RecurrenceConfig
from ejkernel.xla_utils.symbolic import at_most

from . import gated_delta_rule as dense
from ._attention import statistics_dtype
from ._pages import over_batch
from ._sequence_chunks import chunks_of
from ._tiles import varying_like

SEQUENTIAL = "sequential"


def reference(*operands: Array | None, spec: GatedDeltaRuleSpec = GatedDeltaRuleSpec()) -> Outputs:
    """The formula of `gated_delta_rule`, from the states of the pool."""

    def step(x: Operands) -> Outputs:
        first, after, slot = sequences_of(x)
        initial = x.states.at[slot].get(mode="fill", fill_value=0)[None]
        tokens = (x.q, x.k, x.v, x.beta, x.g)
        tokens = (None if a is None else a[None] for a in tokens)
        o, final = dense.reference(*tokens, initial, jnp.stack([first, after], -1)[None], spec=spec)
        slot = jnp.where(after > first, slot, x.states.shape[0])
        return Outputs(o[0], x.states.at[slot].set(final[0].astype(x.states.dtype), mode="drop"))

    return over_batch(step, Operands(*operands))


def heuristic(spec: GatedDeltaRuleSpec, operands: Operands, target: Target) -> RecurrenceConfig:
    """The heuristic config of `gated_delta_rule`; on a CPU, sequences of one token are computed one after the other."""
    return space(spec, operands, target)[0]


def space(spec: GatedDeltaRuleSpec, operands: Operands, target: Target) -> list[RecurrenceConfig]:
    """The configs of `gated_delta_rule`, likewise."""
    algorithm = SEQUENTIAL if target.platform == "cpu" else None
    return [replace(config, algorithm=algorithm) for config in dense.space(spec, operands, target)]


@kernel_registry.register("ragged_gated_delta_rule", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space, (SEQUENTIAL,))
def ragged_gated_delta_rule(
    *operands: Array | None,
    spec: GatedDeltaRuleSpec = GatedDeltaRuleSpec(),
    config: RecurrenceConfig = RecurrenceConfig(),
) -> Outputs:
    """o, and the pool with the states after the step."""
    size = max(1, at_most(config.chunk_size, operands[0].shape[1]))
    return as_one_step(partial(_step, spec=spec, config=config, size=size), Operands(*operands))


def _step(
    x: Operands, at: Sequences, *, spec: GatedDeltaRuleSpec, config: RecurrenceConfig, size: int
) -> tuple[Array, Array]:
    """o [t,h,e] and the pool after the sequences, in chunks of `size` tokens."""
    first, after, slot = at
    o = varying_like(x, jnp.zeros(x.v.shape, x.q.dtype))
    if x.v.size == 0:
        return o, x.states
    is_one = after - first == 1
    if config.algorithm == SEQUENTIAL:
        o, pool = _decoded_in_place(x, spec, first, jnp.argsort(~is_one), is_one.sum(), slot, o)
    else:
        o, pool = decoded(x, spec, jnp.where(is_one, first, x.q.shape[0]), slot, o)
    spans = jnp.stack([first, jnp.where(is_one, first, after)], -1)
    return _prefilled(x, spec, size, spans, slot, o, pool)


def _tokens(x: Operands, at: Array) -> tuple:
    """The tokens at indices [c], [c,h,…] each; 0 for indices past the last token."""
    of = lambda a: a.at[at].get(mode="fill", fill_value=0)
    return tuple(None if a is None else of(a) for a in (x.q, x.k, x.v, x.beta, x.g))


def decoded(x: Operands, spec: GatedDeltaRuleSpec, token: Array, slot: Array, o: Array) -> tuple[Array, Array]:
    """o and the pool after the sequences of one token; `token` [n] is out of range for all others."""
    dtype, count = statistics_dtype(x.q.dtype), x.states.shape[0]
    state = x.states.at[slot].get(mode="fill", fill_value=0).astype(dtype)
    state, of_tokens = dense.of_token(dtype, spec, state, _tokens(x, token))
    slot = jnp.where(token < x.q.shape[0], slot, count)
    pool = x.states.at[slot].set(state.astype(x.states.dtype), mode="drop")
    return o.at[token].set(of_tokens.astype(o.dtype), mode="drop"), pool


def _decoded_in_place(
    x: Operands, spec: GatedDeltaRuleSpec, first: Array, order: Array, count: Array, slot: Array, o: Array
) -> tuple[Array, Array]:
    """`decoded` for the first `count` sequences in an order, one after the other; first and slot are [n]."""
    dtype, slots = statistics_dtype(x.q.dtype), x.states.shape[0]

    def sequence(i, carry):
        o, pool = carry
        at, place = first[order[i]], slot[order[i]]
        stored = lax.dynamic_slice_in_dim(pool, place, 1)
        initial = jnp.where(place < slots, stored, 0).astype(dtype)
        state, of_token = dense.of_token(dtype, spec, initial, _tokens(x, at[None]))
        state = jnp.where(place < slots, state.astype(pool.dtype), stored)
        o = lax.dynamic_update_slice_in_dim(o, of_token.astype(o.dtype), at, 0)
        return o, lax.dynamic_update_slice_in_dim(pool, state, place, 0)

    return lax.fori_loop(np.int32(0), count.astype(np.int32), sequence, (o, varying_like(x, x.states)))


def _prefilled(
    x: Operands, spec: GatedDeltaRuleSpec, size: int, spans: Array, slot: Array, o: Array, pool: Array
) -> tuple[Array, Array]:
    """o and the pool after the sequences of spans [n,2]; a sequence's state is written after each of its chunks."""
    dtype, sequences = statistics_dtype(x.q.dtype), spans.shape[0]
    chunks = chunks_of(spans[None], x.q.shape[0], size)
    tokens, begins = chunks.token[0].reshape(-1, size), chunks.begins[0]

    def step(i, carry):
        o, pool, state, place = carry
        sequence, at = begins[i], tokens[i]
        place = jnp.where(sequence < sequences, slot.at[sequence].get(mode="clip"), place)
        initial = pool.at[place].get(mode="fill", fill_value=0).astype(dtype)[None]
        state = jnp.where(sequence < sequences, initial, state)
        chunk = (None if a is None else jnp.moveaxis(a, 0, 1)[None] for a in _tokens(x, at))  # [1,h,c,…]
        state, of_chunk = dense.of_chunk(dtype, spec, state, tuple(chunk))
        o = o.at[at].set(jnp.moveaxis(of_chunk[0], 1, 0).astype(o.dtype), mode="drop")
        return o, pool.at[place].set(state[0].astype(pool.dtype), mode="drop"), state, place

    nothing = jnp.zeros((1, *pool.shape[1:]), dtype), jnp.array(pool.shape[0], np.int32)
    start = (o, pool, *varying_like(x, nothing))
    return lax.fori_loop(np.int32(0), chunks.last.max() + 1, step, start)[:2]
