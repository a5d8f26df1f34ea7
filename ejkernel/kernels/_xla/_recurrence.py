"""The linear recurrence in XLA: the reference, token by token, and the decomposition that is lowered, chunk by chunk.

A block of tokens i, j = 1 … c with the initial state h is computed at once: an inter-chunk part, from h, and an
intra-chunk part, from pairs of tokens. With one log decay g, of heads or of features,

    o_i = scale q_iᵀ (exp(P_i) h + Σ_{j≤i} exp(D_ij) k_j v_jᵀ),    h' = exp(P_c) h + Σ_j exp(D_cj) k_j v_jᵀ
    D_ij = Σ_{j<l≤i} g_l,    P_i = Σ_{l≤i} g_l

Each D_ij is summed separately, and not computed as P_i − P_j, whose error would be that of the longest sum. It is not
positive if no g is, so that nothing overflows however fast decays are.

With a decay for each feature D is [c, c, d]: blocks are short then, and a chunk is several of them. Gradients store
only the chunk states of the forward and recompute the rest, so that memory is linear in the sequence at any order of
differentiation.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.kernels._registry import configured_by
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ejkernel.types import Target
from ejkernel.types.recurrence import RecurrenceConfig
from ejkernel.xla_utils.symbolic import at_most

from ._attention import statistics_dtype, where
from ._decays import decay_of, times
from ._differentiated import backward_of, tangent_of
from ._sequence_chunks import initial_states, over_chunks, over_tokens
from ._tiles import varying_like

# --- The formula ------------------------------------------------------------------------------------------------------


def reference(*operands: Array | None, spec: RecurrenceSpec = RecurrenceSpec()) -> Outputs:
    """The formula: one step for each token, in float32, or in float64 if the inputs are."""
    x = Operands(*operands)
    dtype, heads = statistics_dtype(x.q.dtype), x.q.shape[2]
    of_heads = lambda a: jnp.repeat(a, heads // a.shape[2], axis=2)
    wide = lambda a: None if a is None else a.astype(dtype)
    gates = _gates_of_heads(x, dtype), wide(x.gk), wide(x.gv)

    def step(h, of_token):
        q, k, v, *gates = of_token
        for gate, axes in zip(gates, ((2, 3), (3,), (2,)), strict=True):
            h = h if gate is None else h * jnp.exp(lax.expand_dims(gate, axes))
        h = h + k[..., None] * v[:, :, None]
        return h, jnp.einsum("bhd,bhde->bhe", q * spec.softmax_scale, h, precision="highest")

    tokens = wide(x.q), of_heads(wide(x.k)), of_heads(wide(x.v)), *gates
    o, final_state = over_tokens(step, _initial_state(x, dtype), tokens, x.spans, spec.reverse)
    return Outputs(o.astype(x.q.dtype), final_state)


def _gates_of_heads(x: Operands, dtype: Any) -> Array | None:
    """g + g_gamma [b,s,h], None if both are absent."""
    if x.g_gamma is None:
        return None if x.g is None else x.g.astype(dtype)
    gamma = jnp.broadcast_to(x.g_gamma.astype(dtype)[:, None], x.q.shape[:3])
    return gamma if x.g is None else gamma + x.g.astype(dtype)


def _initial_state(x: Operands, dtype: Any) -> Array:
    """The initial states of all sequences, [b,n,h,d,e]."""
    state = (x.q.shape[2], x.q.shape[3], x.v.shape[3])
    return initial_states(x, x.initial_state, state, x.spans, dtype)


# --- Forward ----------------------------------------------------------------------------------------------------------


def heuristic(spec: RecurrenceSpec, operands: Operands, target: Target) -> RecurrenceConfig:
    """subchunk_size is the tokens of a block; a decay per feature needs subchunk_size · tokens · features."""
    return RecurrenceConfig(chunk_size=64, subchunk_size=64 if _decays_by_head(operands) else 16)


def space(spec: RecurrenceSpec, operands: Operands, target: Target) -> list[RecurrenceConfig]:
    """The heuristic config and, except on a CPU, longer chunks, which store less and recompute more."""
    if target.platform == "cpu":
        return [heuristic(spec, operands, target)]
    blocks = (32, 64, 128) if _decays_by_head(operands) else (8, 16)
    return [RecurrenceConfig(chunk_size=chunk, subchunk_size=block) for chunk in (64, 128, 256) for block in blocks]


def _decays_by_head(operands: Operands) -> bool:
    return operands.gk is None and operands.gv is None


@configured_by(heuristic, space)
@partial(jax.jit, static_argnames=("spec", "config"))
def recurrence(
    *operands: Array | None, spec: RecurrenceSpec = RecurrenceSpec(), config: RecurrenceConfig = RecurrenceConfig()
) -> Outputs:
    """o and the final state, chunk by chunk."""
    x = Operands(*operands)
    dtype, length = statistics_dtype(x.q.dtype), x.q.shape[1]
    states = _initial_state(x, dtype)
    if x.q.size == 0:  # without tokens the states stay as they are
        return Outputs(varying_like(x, jnp.zeros((*x.q.shape[:3], x.v.shape[-1]), x.q.dtype)), states)
    block = max(1, at_most(min(config.subchunk_size, config.chunk_size), length))
    blocks = max(1, at_most(config.chunk_size // block, -(-length // block)))
    one_block = partial(block_of_tokens, dtype, spec.softmax_scale)

    def chunk(state, tokens):
        if blocks == 1:
            state, o = one_block(state, tokens)
        else:
            state, o = lax.scan(jax.checkpoint(one_block), state, _divided(tokens, blocks))
            o = jnp.moveaxis(o, 0, 2).reshape(*o.shape[1:3], blocks * block, -1)
        return state, o.astype(x.q.dtype)

    tokens = (x.q, x.k, x.v, _gates_of_heads(x, dtype), x.gk, x.gv)
    return Outputs(*over_chunks(chunk, states, tokens, x.spans, block * blocks, spec.reverse))


def _divided(tokens: tuple, blocks: int) -> tuple:
    """Divides tokens into blocks, [b,h,size,…] -> [blocks,b,h,block,…]."""
    return jax.tree.map(
        lambda a: jnp.moveaxis(a.reshape(*a.shape[:2], blocks, a.shape[2] // blocks, *a.shape[3:]), 2, 0), tokens
    )


def block_of_tokens(dtype: Any, scale: float, state: Array, tokens: tuple) -> tuple[Array, Array]:
    """The state [b,h,d,e] after a block, and o [b,h,c,e], by the equations at the head of this file."""
    q, k, v, *gates = tokens
    of_heads = lambda a: jnp.repeat(a, state.shape[1] // a.shape[1], axis=1)
    q, k, v = q.astype(dtype) * scale, k.astype(dtype), of_heads(v.astype(dtype))
    if q.shape[1] != k.shape[1]:
        k = of_heads(k)
    of_head, of_key, of_value = (decay_of(gate, dtype) for gate in gates)
    if of_key.between is None:
        weights = of_heads(_product("bhid,bhjd->bhij", q, k))
        q, k = of_heads(q), of_heads(k)
    else:
        q, k = of_heads(q), of_heads(k)
        weights = (q[:, :, :, None] * k[:, :, None] * of_key.between).sum(-1)
    weights = times(weights, of_head.between)
    weights = where(np.tri(q.shape[2], dtype=bool)[None, None], weights, 0)
    if of_value.between is None:
        o = _product("bhij,bhje->bhie", weights, v)
    else:
        o = (weights[..., None] * v[:, :, None] * of_value.between).sum(3)
    q = times(times(q, of_key.since), of_head.since)
    o = o + times(_product("bhid,bhde->bhie", q, state), of_value.since)
    k, v = times(times(k, of_key.until), of_head.until), times(v, of_value.until)
    for total, axes in ((of_head.total, (2, 3)), (of_key.total, (3,)), (of_value.total, (2,))):
        state = state if total is None else state * lax.expand_dims(total, axes)
    return state + _product("bhjd,bhje->bhde", k, v), o


def _product(axes: str, a: Array, b: Array) -> Array:
    return jnp.einsum(axes, a, b, precision="highest")


# --- Tangent and backward ---------------------------------------------------------------------------------------------


recurrence_jvp = tangent_of(recurrence, RecurrenceSpec(), Operands, Outputs)
recurrence_bwd = backward_of(recurrence, RecurrenceSpec(), Operands, Outputs)
