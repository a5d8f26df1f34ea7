"""Mamba-2's state space in XLA: the linear recurrence of `_recurrence` with queries C, keys B and values dt · x.

    h_t = exp(dt_t · A) · h_{t−1} + dt_t · x_t B_tᵀ,    y_t = h_t C_t + D · x_t

is a recurrence with the log decay g_t = dt_t · A for each head and a transposed state. A chunk is two matrix products
with a mask of decays between them (state space duality); C·B is computed once for the heads that share them.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._registry import configured_by
from ejkernel.primitives.state_space_v2 import Operands, Outputs, StateSpaceSpec
from ejkernel.types import Target
from ejkernel.types.recurrence import RecurrenceConfig
from ejkernel.xla_utils.symbolic import at_most

from ._attention import statistics_dtype
from ._differentiated import backward_of, register, tangent_of
from ._recurrence import block_of_tokens
from ._sequence_chunks import initial_states, is_one_token, over_chunks, over_one_token, over_tokens
from ._tiles import varying_like


def reference(*operands: Array | None, spec: StateSpaceSpec = StateSpaceSpec()) -> Outputs:
    """The formula: one step for each token, in float32, or in float64 if the inputs are."""
    x = Operands(*operands)
    dtype = statistics_dtype(x.x.dtype)
    A, D = (None if a is None else a.astype(dtype) for a in (x.A, x.D))

    def step(h, of_token):
        u, dt, B, C = of_token
        h = h * jnp.exp(dt * A)[..., None, None] + (dt[..., None] * u)[..., None] * B[:, :, None]
        y = (h * C[:, :, None]).sum(-1)
        return h, y if D is None else y + D[..., None] * u

    B, C = (jnp.repeat(a.astype(dtype), x.x.shape[2] // a.shape[2], axis=2) for a in (x.B, x.C))
    o, final_state = over_tokens(step, _initial_state(x), (x.x.astype(dtype), x.dt.astype(dtype), B, C), x.spans)
    return Outputs(o.astype(x.x.dtype), final_state)


def _initial_state(x: Operands) -> Array:
    """The initial states of all sequences, [b,n,h,e,d]."""
    state = (*x.x.shape[2:], x.B.shape[3])
    return initial_states(x, x.initial_state, state, x.spans, statistics_dtype(x.x.dtype))


# --- Chunks -----------------------------------------------------------------------------------------------------------


def heuristic(spec: StateSpaceSpec, operands: Operands, target: Target) -> RecurrenceConfig:
    """chunk_size is the tokens of a chunk: short on a CPU, to compute less, and long elsewhere, to fill the device."""
    return RecurrenceConfig(chunk_size=32 if target.platform == "cpu" else 64)


def space(spec: StateSpaceSpec, operands: Operands, target: Target) -> list[RecurrenceConfig]:
    """The heuristic config and, except on a CPU, longer chunks, which store less and compute more."""
    if target.platform == "cpu":
        return [heuristic(spec, operands, target)]
    return [RecurrenceConfig(chunk_size=chunk_size) for chunk_size in (64, 128, 256)]


@configured_by(heuristic, space)
@partial(jax.jit, static_argnames=("spec", "config"))
def state_space_v2(
    *operands: Array | None, spec: StateSpaceSpec = StateSpaceSpec(), config: RecurrenceConfig = RecurrenceConfig()
) -> Outputs:
    """y and the final state, chunk by chunk."""
    x = Operands(*operands)
    dtype, states = statistics_dtype(x.x.dtype), _initial_state(x)
    if x.x.size == 0:  # without tokens the states stay as they are
        return Outputs(varying_like(x, jnp.zeros(x.x.shape, x.x.dtype)), states)
    A, D = (None if a is None else a.astype(dtype) for a in (x.A, x.D))
    if is_one_token(x.x, x.spans):
        tokens = tuple(a.astype(dtype) for a in (x.x, x.dt, x.B, x.C))
        o, final = over_one_token(partial(_of_token, A, D), states, tokens)
        return Outputs(o.astype(x.x.dtype), final)

    def chunk(state, tokens):
        u, dt, B, C = (a.astype(dtype) for a in tokens)
        gates = (dt * A[:, :, None], None, None)
        state, y = block_of_tokens(dtype, 1.0, state, (C, B, u * dt[..., None], *gates))
        y = y if D is None else y + D[:, :, None, None] * u
        return state, y.astype(x.x.dtype)

    size = max(1, at_most(config.chunk_size, x.x.shape[1]))
    o, final = over_chunks(chunk, jnp.swapaxes(states, -1, -2), (x.x, x.dt, x.B, x.C), x.spans, size)
    return Outputs(o, jnp.swapaxes(final, -1, -2))


def _of_token(A: Array, D: Array | None, h: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
    """The state [b,h,e,d] after a token, and y [b,h,e] from the state before it: both are computed at the same time.

    h_t C = exp(dt · A) · h_{t−1} C + dt · x (B · C), with one product for the heads of a group.
    """
    u, dt, B, C = token
    of_groups = lambda a: a.reshape(a.shape[0], B.shape[1], a.shape[1] // B.shape[1], *a.shape[2:])
    of_heads = lambda a: jnp.repeat(a, h.shape[1] // B.shape[1], axis=1)
    decay, added = jnp.exp(dt * A)[..., None], dt[..., None] * u
    read = jnp.einsum("bgred,bgd->bgre", of_groups(h), C, precision="highest").reshape(u.shape)
    y = decay * read + added * of_heads((B * C).sum(-1, keepdims=True))
    h = h * decay[..., None] + added[..., None] * of_heads(B)[:, :, None]
    return h, y if D is None else y + D[..., None] * u


state_space_v2_jvp = tangent_of(state_space_v2, StateSpaceSpec(), Operands, Outputs)
state_space_v2_bwd = backward_of(state_space_v2, StateSpaceSpec(), Operands, Outputs)

register("state_space_v2", state_space_v2, state_space_v2_jvp, state_space_v2_bwd)
