"""The kernels of ragged_gated_delta_rule: one for sequences of few tokens, and two for chunks of the others.

A program has a block of columns of a head's state of one sequence, which it reads from the pool and writes back. Few
tokens are the steps of gated_delta_rule, and chunks those of its forward. Each launch leaves the sequences of the
others alone, in the pool and in o.
"""

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax import Array

from ejkernel.kernels._ragged_gated_delta_rule import Sequences, as_one_step
from ejkernel.kernels._triton._in_place import launch_in_place
from ejkernel.kernels._triton._recurrence import tiles
from ejkernel.kernels._triton._recurrence.problem import Problem, places_of
from ejkernel.kernels._triton._recurrence.step import LONGEST
from ejkernel.kernels._triton.gated_delta_rule import chunks, step
from ejkernel.kernels._triton.gated_delta_rule.configs import warps_of_step
from ejkernel.kernels._triton.gated_delta_rule.forward import last_state
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec
from ejkernel.primitives.gated_delta_rule import Operands as Dense
from ejkernel.primitives.ragged_gated_delta_rule import Operands, Outputs
from ejkernel.types.recurrence import RecurrenceConfig
from ejkernel.xla_utils.search import entries_before


def ragged_gated_delta_rule(*operands: Array | None, spec: GatedDeltaRuleSpec, config: RecurrenceConfig) -> Outputs:
    """o, and the pool with the states after the step."""
    return as_one_step(lambda x, at: _step(x, at, spec, config), Operands(*operands))


def _step(x: Operands, at: Sequences, spec: GatedDeltaRuleSpec, config: RecurrenceConfig) -> tuple[Array, Array]:
    tokens, sequences = x.q.shape[0], at.first.shape[0]
    # With no more tokens than sequences all are computed token by token: the two other launches, which would most often
    # find nothing, took 16 µs beside 83 for 64 decodes on an H200.
    at = Sequences(*(a.astype(np.int32) for a in at))
    is_long = (at.after - at.first > LONGEST) & (tokens > sequences)
    o, states = _token_by_token(x, at._replace(after=jnp.where(is_long, at.first, at.after)), spec, config)
    most = min(sequences, tokens // (LONGEST + 1))
    if tokens <= sequences or not most:
        return o, states
    # Numbers of the long sequences, of which there are no more than tokens allow; past them that of none.
    number = entries_before(jnp.cumsum(is_long, dtype=np.int32), jnp.arange(1, most + 1, dtype=np.int32))
    of_none = Sequences(0, 0, states.shape[0])
    long = Sequences(*(a.at[number].get(mode="fill", fill_value=none) for a, none in zip(at, of_none, strict=True)))
    return _by_chunks(x._replace(states=states), o, long, spec, config)


def _problem(x: Operands, at: Sequences, spec: GatedDeltaRuleSpec, config: RecurrenceConfig) -> tuple[Dense, Problem]:
    """The sequences as operands of gated_delta_rule, and its `Problem`."""
    spans = jnp.stack([at.first, at.after], -1)[None]
    packed = Dense(*(None if a is None else a[None] for a in (x.q, x.k, x.v, x.beta, x.g)), spans=spans)
    return packed, chunks.problem(packed, spec, config)


def _token_by_token(
    x: Operands, at: Sequences, spec: GatedDeltaRuleSpec, config: RecurrenceConfig
) -> tuple[Array, Array]:
    """o, 0 for tokens of no sequence, and the pool."""
    _, p = _problem(x, at, spec, config)
    columns = min(64 if x.states.dtype.itemsize == 4 else 32, p.V_PAD)
    found = launch_in_place(
        tokens_kernel, x.q, x.k, x.v, x.beta, x.g, *at,
        placed=dict(states=x.states),
        new=dict(o=jax.ShapeDtypeStruct(x.v.shape, x.q.dtype)),
        zeroed=("o",),
        grid=p.N * p.H * triton.cdiv(p.V, columns),
        config=RecurrenceConfig(num_warps=warps_of_step(p.D, columns), num_stages=1),
        p=p, SLOTS=x.states.shape[0], COLUMNS=columns, NORMALISED=spec.use_qk_l2norm,
    )  # fmt: skip
    return found["o"], found["states"]


def _by_chunks(
    x: Operands, o: Array, at: Sequences, spec: GatedDeltaRuleSpec, config: RecurrenceConfig
) -> tuple[Array, Array]:
    """o and the pool, in the place of those that were given."""
    packed, p = _problem(x, at, spec, config)
    places = places_of(packed, p)
    of = chunks.chunks_of(packed, spec, places, p, config, for_gradients=False)
    columns = min(config.block_v, p.V_PAD)
    found = launch_in_place(
        chunks_kernel, x.q, of.q_since, of.x_to_o, x.k, x.v, x.beta, of.k_since, of.total, of.x_to_state,
        *places[:3], at.slot,
        placed=dict(o=o, states=x.states),
        new={},
        grid=p.N * p.H * triton.cdiv(p.V, columns),
        config=config,
        p=p, SLOTS=x.states.shape[0], COLUMNS=columns,
    )  # fmt: skip
    return found["o"], found["states"]


@triton.jit
def tokens_kernel(
    q, k, v, beta, g, first, after, slot,
    states, o,
    p: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    column, number = step.block_of_program(COLUMNS, p)
    n, head = number // p.H, number % p.H
    begin = tl.load(first + n)
    tokens = tl.load(after + n) - begin
    if tokens > 0:
        address, exists = place_in_pool(states, slot, n, head, column, SLOTS, COLUMNS, p)
        state = tl.load(address, mask=exists, other=0.0).to(tl.float32)
        token = tl.cast(begin, tl.int64)
        state = step.after_token(state, q, k, v, beta, g, o, token, head, column, COLUMNS, NORMALISED, p)
        for i in range(1, tokens):
            state = step.after_token(state, q, k, v, beta, g, o, token + i, head, column, COLUMNS, NORMALISED, p)
        tl.store(address, state.to(states.dtype.element_ty), mask=exists)


@triton.jit
def chunks_kernel(
    q, q_since, x_to_o, k, v, beta, k_since, total, x_to_state, first, length, chunk, slot,
    o, states,
    p: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column, number = step.block_of_program(COLUMNS, p)
    n, head = number // p.H, number % p.H
    token, tokens, first_chunk = tiles.sequence_at(0, n, first, length, chunk, p)
    if tokens > 0:
        address, exists = place_in_pool(states, slot, n, head, column, SLOTS, COLUMNS, p)
        state = tl.load(address, mask=exists, other=0.0).to(tl.float32)
        state = last_state(
            state, q, q_since, x_to_o, k, v, beta, k_since, total, x_to_state, None, o, None,
            0, head, token, tokens, first_chunk, column, p, COLUMNS,
        )  # fmt: skip
        tl.store(address, state.to(states.dtype.element_ty), mask=exists)


@triton.jit
def place_in_pool(states, slot, n, head, column, SLOTS: tl.constexpr, COLUMNS: tl.constexpr, p: tl.constexpr):
    """Pointers to a block of the state of sequence n, and which elements exist: none of a slot past the end."""
    at = tl.load(slot + n)
    address, exists = tiles.state_pointers(states, tl.cast(at, tl.int64) * p.H + head, 0, p.D_PAD, column, COLUMNS, p)
    return address, exists & (at < SLOTS)
