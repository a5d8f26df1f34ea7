"""Mamba's selective state space in XLA: the formula, and its decomposition into chunks of tokens.

    h_t = exp(dt_t · A) ∘ h_{t−1} + dt_t · x_t · B_t,    y_t = C_t · h_t + D · x_t

The decays of a channel have no factor in common over its state, so that a chunk is no matrix product. On a CPU it is a
loop over its tokens, the state of which stays in the cache. Elsewhere it is an associative scan of (a, u) for
h ↦ a ∘ h + u, of which two in turn are (a₂ a₁, a₂ u₁ + u₂): twice the work, in as many steps as its length has bits.
Of the forward a derivative keeps the states between chunks, and the rest is computed again.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels._registry import configured_by
from ejkernel.primitives.state_space_v1 import Operands, Outputs, StateSpaceSpec
from ejkernel.types import KernelConfig, Target
from ejkernel.xla_utils.symbolic import at_most

from ._attention import statistics_dtype
from ._differentiated import backward_of, register, tangent_of
from ._sequence_chunks import initial_states, over_chunks, over_tokens
from ._tiles import varying_like

ASSOCIATIVE = "associative_scan"


def reference(*operands: Array | None, spec: StateSpaceSpec = StateSpaceSpec()) -> Outputs:
    """The formula: one step for each token, in float32 or, where the inputs are, in float64."""
    x = Operands(*operands)
    dtype = statistics_dtype(x.x.dtype)
    A, D = (None if a is None else a.astype(dtype) for a in (x.A, x.D))

    def step(h, of_token):
        u, dt, B, C = of_token
        h = h * jnp.exp(dt[..., None] * A) + (dt * u)[..., None] * B[:, None]
        y = (h * C[:, None]).sum(-1)
        return h, y if D is None else y + D * u

    tokens = tuple(a.astype(dtype) for a in (x.x, x.dt, x.B, x.C))
    o, final_state = over_tokens(step, _initial_state(x), tokens, x.spans)
    return Outputs(o.astype(x.x.dtype), final_state)


def _initial_state(x: Operands) -> Array:
    """[b,n,h,d]."""
    return initial_states(x, x.initial_state, x.A.shape[1:], x.spans, statistics_dtype(x.x.dtype))


# --- Chunks -----------------------------------------------------------------------------------------------------------


def heuristic(spec: StateSpaceSpec, operands: Operands, target: Target) -> KernelConfig:
    """block_q is a chunk, block_k how many of its tokens are one step of a loop."""
    if target.platform == "cpu":
        return KernelConfig(block_q=32, block_k=8)
    return KernelConfig(block_q=64, algorithm=ASSOCIATIVE)


def space(spec: StateSpaceSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    """Longer chunks need more memory and fewer steps. On a CPU only the heuristic one."""
    if target.platform == "cpu":
        return [heuristic(spec, operands, target)]
    return [KernelConfig(block_q=block_q, algorithm=ASSOCIATIVE) for block_q in (64, 32, 128)]


@configured_by(heuristic, space, (ASSOCIATIVE,))
@partial(jax.jit, static_argnames=("spec", "config"))
def state_space_v1(
    *operands: Array | None, spec: StateSpaceSpec = StateSpaceSpec(), config: KernelConfig = KernelConfig()
) -> Outputs:
    """y and the final state, chunk by chunk."""
    x = Operands(*operands)
    dtype, states = statistics_dtype(x.x.dtype), _initial_state(x)
    if x.x.size == 0:  # no token, so that nothing leads from one state to another
        return Outputs(varying_like(x, jnp.zeros(x.x.shape, x.x.dtype)), states)
    A, D = (None if a is None else a.astype(dtype) for a in (x.A, x.D))
    size = max(1, at_most(config.block_q, x.x.shape[1]))

    def chunk(state, tokens):
        u, dt, B, C = (jnp.moveaxis(a.astype(dtype), 2, 0) for a in tokens)  # [c,b,h] and [c,b,1,d]
        if config.algorithm == ASSOCIATIVE:
            state, y = _by_associative_scan(A, state, u, dt, B, C)
        else:
            step = partial(_step, A)
            state, y = lax.scan(step, state, (u, dt, B, C), unroll=max(1, min(config.block_k, size)))
        y = y if D is None else y + D[None] * u
        return state, jnp.moveaxis(y, 0, 2).astype(x.x.dtype)

    tokens = x.x, x.dt, x.B[:, :, None], x.C[:, :, None]
    return Outputs(*over_chunks(chunk, states, tokens, x.spans, size))


def _step(A: Array, h: Array, of_token: tuple) -> tuple[Array, Array]:
    u, dt, B, C = of_token
    h = h * jnp.exp(dt[..., None] * A) + (dt * u)[..., None] * B
    return h, (h * C).sum(-1)


def _by_associative_scan(A: Array, h: Array, u: Array, dt: Array, B: Array, C: Array) -> tuple[Array, Array]:
    """The state after a chunk, and y [c,b,h]."""
    of_two = lambda first, second: (second[0] * first[0], second[0] * first[1] + second[1])
    decays, added = lax.associative_scan(of_two, (jnp.exp(dt[..., None] * A[None]), (dt * u)[..., None] * B))
    states = decays * h[None] + added
    return states[-1], (states * C).sum(-1)


state_space_v1_jvp = tangent_of(state_space_v1, StateSpaceSpec(), Operands, Outputs)
state_space_v1_bwd = backward_of(state_space_v1, StateSpaceSpec(), Operands, Outputs)

register("state_space_v1", state_space_v1, state_space_v1_jvp, state_space_v1_bwd)
