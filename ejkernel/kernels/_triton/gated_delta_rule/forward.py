"""The forward: one program for a block of columns of a head's state, which it keeps in registers, chunk after chunk.

With h the state before a chunk, and the matrices and factors of `chunks`,

    x = β (v − k_since K h),    o = q_since Q h + A' x,    h' = total h + K'ᵀ x
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._recurrence import tiles
from ejkernel.kernels._triton._recurrence.problem import Places, Problem, places_of, zero_elsewhere
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec, Operands, Outputs
from ejkernel.types.recurrence import RecurrenceConfig

from . import chunks, step
from .chunks import Chunks


def gated_delta_rule(*operands, spec=GatedDeltaRuleSpec(), config=RecurrenceConfig()) -> Outputs:
    """o and the final state."""
    x = Operands(*operands)
    if config.algorithm == "steps":
        return step.gated_delta_rule(x, spec, config)
    p = chunks.problem(x, spec, config)
    places = places_of(x, p)
    of = chunks.chunks_of(x, spec, places, p, config, for_gradients=False)
    o = jax.ShapeDtypeStruct((p.B, p.S, p.H, p.V), x.v.dtype)
    final = jax.ShapeDtypeStruct((p.B, p.sequences, p.H, p.D, p.V), jnp.float32)
    found = _pass_over(x, of, dict(o=o, final=final), places, p, config)
    return Outputs(zero_elsewhere(found["o"], places), found["final"])


def states_and_deltas(
    x: Operands, of: Chunks, places: Places, p: Problem, config: RecurrenceConfig
) -> dict[str, jax.Array]:
    """The states before chunks [b,chunks,h,d,e] and deltas v − k_since K h [b,s,h,e], in the dtype of products."""
    states = jax.ShapeDtypeStruct((p.B, p.chunks, p.H, p.D, p.V), chunks.kept_dtype(p))
    deltas = jax.ShapeDtypeStruct((p.B, p.S, p.H, p.V), chunks.kept_dtype(p))
    return _pass_over(x, of, dict(states=states, deltas=deltas), places, p, config)


def _pass_over(
    x: Operands, of: Chunks, types: dict, places: Places, p: Problem, config: RecurrenceConfig
) -> dict[str, jax.Array]:
    """Runs forward_kernel for the results named in `types`."""
    columns = min(config.block_v, p.V_PAD)
    of_outputs = (x.q, of.q_since, of.x_to_o) if "o" in types else (None, None, None)
    return _launch.launch(
        forward_kernel,
        *(*of_outputs, x.k, x.v, x.beta, of.k_since, of.total, of.x_to_state, x.initial_state, *places[:3]),
        out_type=dict(sorted(types.items())),
        grid=p.B * p.sequences * p.H * triton.cdiv(p.V, columns),
        config=config,
        p=p,
        COLUMNS=columns,
        **{name: None for name in ("deltas", "final", "o", "states") if name not in types},
    )


@triton.jit
def forward_kernel(
    q, q_since, x_to_o, k, v, beta, k_since, total, x_to_state, start, first, length, chunk,
    deltas, final, o, states,
    p: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column, head, batch, number, token, tokens, first_chunk = block_of_program(first, length, chunk, COLUMNS, p)
    state = tiles.first_state(start, number, 0, p.D_PAD, column, COLUMNS, p)
    state = last_state(
        state, q, q_since, x_to_o, k, v, beta, k_since, total, x_to_state, deltas, o, states,
        batch, head, token, tokens, first_chunk, column, p, COLUMNS,
    )  # fmt: skip
    if final is not None:
        address, exists = tiles.state_pointers(final, number, 0, p.D_PAD, column, COLUMNS, p)
        tl.store(address, state, mask=exists)


@triton.jit
def last_state(
    state, q, q_since, x_to_o, k, v, beta, k_since, total, x_to_state, deltas, o, states,
    batch, head, token, tokens, first_chunk, column, p: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The state after the chunks of a sequence, of which o, and what gradients need, are stored."""
    for c in tl.range(0, (tokens + p.C - 1) // p.C):
        at, left = token + c * p.C, tokens - c * p.C
        of_chunk = (batch * p.chunks + first_chunk + c) * p.H + head
        k_tile = tiles.load_tile(k, batch, at, left, head // p.per_key, p.HK, 0, p.D, p.D_PAD, p).to(p.dtype)
        v_tile = tiles.load_tile(v, batch, at, left, head, p.H, column, p.V, COLUMNS, p).to(tl.float32)
        rounded = state.to(p.dtype)
        if states is not None:
            kept, exists = tiles.state_pointers(states, of_chunk, 0, p.D_PAD, column, COLUMNS, p)
            tl.store(kept, rounded, mask=exists)
        delta = (
            v_tile - tiles.product(k_tile, rounded, p) * chunks.load_rows(k_since, batch, at, left, head, p)[:, None]
        )
        if deltas is not None:
            tiles.store_tile(deltas, delta, batch, at, left, head, p.H, column, p.V, COLUMNS, p)
        x_tile = delta * chunks.load_rows(beta, batch, at, left, head, p)[:, None]
        if o is not None:
            q_tile = tiles.load_tile(q, batch, at, left, head // p.per_query, p.HQ, 0, p.D, p.D_PAD, p).to(p.dtype)
            o_tile = tiles.product(q_tile, rounded, p) * chunks.load_rows(q_since, batch, at, left, head, p)[:, None]
            o_tile = chunks.add_product(o_tile, tl.load(chunks.pair_pointers(x_to_o, of_chunk, p)), x_tile, p)
            tiles.store_tile(o, o_tile, batch, at, left, head, p.H, column, p.V, COLUMNS, p)
        out_tile = tiles.load_tile(x_to_state, batch, at, left, head, p.H, 0, p.D, p.D_PAD, p)
        state = chunks.add_product(state * tl.load(total + of_chunk), tl.trans(out_tile), x_tile, p)
    return state


@triton.jit
def block_of_program(first, length, chunk, COLUMNS: tl.constexpr, p: tl.constexpr):
    """First column, head and batch element of a program, the number of its state, and first token, number of tokens
    and first chunk of its sequence.
    """
    blocks: tl.constexpr = (p.V + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    column, number = pid % blocks * COLUMNS, pid // blocks
    head, n, batch = number % p.H, number // p.H % p.sequences, number // (p.H * p.sequences)
    token, tokens, first_chunk = tiles.sequence_at(batch, n, first, length, chunk, p)
    return column, head, batch, number, token, tokens, first_chunk
