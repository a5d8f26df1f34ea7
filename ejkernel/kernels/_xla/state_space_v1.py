"""Mamba's selective state space in XLA: the formula, and its decomposition into chunks of tokens.

    h_t = exp(dt_t · A) ∘ h_{t−1} + dt_t · x_t · B_t,    y_t = C_t · h_t + D · x_t

The decays of a channel have no common factor over its state, so that a chunk is not a matrix product. On a CPU it is a
loop over tokens, whose state stays in the cache. Elsewhere it is an associative scan over the maps h ↦ a ∘ h + u, where
(a₁, u₁) followed by (a₂, u₂) is (a₂ a₁, a₂ u₁ + u₂): twice the work, in a logarithmic number of steps. Derivatives
store the states between chunks of the forward and recompute the rest.

A state is [b,d,h], with channels last. In the loop, sums over d and over h are written as products of a matrix and a
vector: these take a tenth of the time of XLA's loop for a sum on a CPU, which recomputes exponentials.

The gradient of the loop is a loop from the last token of a chunk to its first. With a_t = exp(dt_t · A),

    λ_t = dy_t · C_t + a_{t+1} ∘ λ_{t+1},    e_t = λ_t ∘ a_t ∘ h_{t−1}
    dx_t = dt_t · λ_t B_t,    dB_t = λ_t (dt_t · x_t),    dC_t = h_t dy_t
    ddt_t = Σ_d e_t ∘ A + x_t · λ_t B_t,    dA = Σ_t dt_t · e_t
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels._registry import configured_by
from ejkernel.primitives.state_space_v1 import Operands, Outputs, StateSpaceSpec
from ejkernel.types import Target
from ejkernel.types.recurrence import RecurrenceConfig
from ejkernel.xla_utils.symbolic import at_most

from ._attention import statistics_dtype
from ._differentiated import backward_of, register, tangent_of
from ._sequence_chunks import initial_states, is_one_token, over_chunks, over_one_token, over_tokens
from ._tiles import varying_like

ASSOCIATIVE = "associative_scan"


def reference(*operands: Array | None, spec: StateSpaceSpec = StateSpaceSpec()) -> Outputs:
    """The formula: one step for each token, in float32, or in float64 if the inputs are."""
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
    """The initial states of all sequences, [b,n,h,d]."""
    return initial_states(x, x.initial_state, x.A.shape[1:], x.spans, statistics_dtype(x.x.dtype))


# --- Chunks -----------------------------------------------------------------------------------------------------------


def heuristic(spec: StateSpaceSpec, operands: Operands, target: Target) -> RecurrenceConfig:
    """The heuristic config: chunk_size is the tokens of a chunk."""
    if target.platform == "cpu":
        return RecurrenceConfig(chunk_size=32)
    return RecurrenceConfig(chunk_size=64, algorithm=ASSOCIATIVE)


def space(spec: StateSpaceSpec, operands: Operands, target: Target) -> list[RecurrenceConfig]:
    """The heuristic config and, except on a CPU, longer chunks, which need more memory and fewer steps."""
    if target.platform == "cpu":
        return [heuristic(spec, operands, target)]
    return [RecurrenceConfig(chunk_size=chunk_size, algorithm=ASSOCIATIVE) for chunk_size in (64, 32, 128)]


@configured_by(heuristic, space, (ASSOCIATIVE,))
@partial(jax.jit, static_argnames=("spec", "config"))
def state_space_v1(
    *operands: Array | None, spec: StateSpaceSpec = StateSpaceSpec(), config: RecurrenceConfig = RecurrenceConfig()
) -> Outputs:
    """y and the final state, chunk by chunk."""
    return _by_chunks(_loop, Operands(*operands), config)


def _by_chunks(loop: Callable[..., tuple[Array, Array]], x: Operands, config: RecurrenceConfig) -> Outputs:
    """y and the final state, where `loop` computes a chunk on a CPU."""
    dtype, states = statistics_dtype(x.x.dtype), _initial_state(x)
    if x.x.size == 0:  # without tokens the states stay as they are
        return Outputs(varying_like(x, jnp.zeros(x.x.shape, x.x.dtype)), states)
    A, D = (None if a is None else a.astype(dtype) for a in (x.A, x.D))
    if is_one_token(x.x, x.spans):
        tokens = tuple(a.astype(dtype) for a in (x.x, x.dt, x.B, x.C))
        y, final = over_one_token(partial(_of_token, A, D), states, tokens)
        return Outputs(y.astype(x.x.dtype), final)
    A = varying_like(x, jnp.swapaxes(A, 1, 2))
    size = max(1, at_most(config.chunk_size, x.x.shape[1]))
    of_chunk = _by_associative_scan if config.algorithm == ASSOCIATIVE else loop

    def chunk(state, tokens):
        u, dt, B, C = (jnp.moveaxis(a.astype(dtype), 2, 0) for a in tokens)  # [c,b,h] and [c,b,1,d]
        state, y = of_chunk(A, state, u, dt, B[:, :, 0], C[:, :, 0])
        y = y if D is None else y + D[None] * u
        return state, jnp.moveaxis(y, 0, 2).astype(x.x.dtype)

    tokens = x.x, x.dt, x.B[:, :, None], x.C[:, :, None]
    y, final = over_chunks(chunk, jnp.swapaxes(states, -1, -2), tokens, x.spans, size)
    return Outputs(y, jnp.swapaxes(final, -1, -2))


def _of_token(A: Array, D: Array | None, h: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
    """The state [b,h,d] after a token, and y [b,h]; the states of a pool are as they are stored, with d last."""
    u, dt, B, C = token
    h = h * jnp.exp(dt[..., None] * A) + (dt * u)[..., None] * B[:, None]
    y = _product("bhd,bd->bh", h, C)
    return h, y if D is None else y + D * u


def _by_associative_scan(A: Array, h: Array, u: Array, dt: Array, B: Array, C: Array) -> tuple[Array, Array]:
    """The state [b,d,h] after a chunk, and y [c,b,h], from A [b?,d,h], u and dt [c,b,h], B and C [c,b,d]."""
    of_two = lambda first, second: (second[0] * first[0], second[0] * first[1] + second[1])
    decays, added = lax.associative_scan(
        of_two, (jnp.exp(dt[:, :, None] * A[None]), (dt * u)[:, :, None] * B[..., None])
    )
    states = decays * h[None] + added
    return states[-1], (states * C[..., None]).sum(2)


# --- The loop over the tokens of a chunk, and its gradient ------------------------------------------------------------


def _loop(A: Array, h: Array, u: Array, dt: Array, B: Array, C: Array) -> tuple[Array, Array]:
    """The state after a chunk and y, token by token."""

    def step(h, token):
        u, dt, B, C = token
        h = _after(A, h, u, dt, B)
        return h, _product("bdh,bd->bh", h, C)

    return lax.scan(step, h, (u, dt, B, C))


_differentiated_loop = jax.custom_vjp(_loop)


def _loop_forward(*arguments: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    return _loop(*arguments), arguments


def _loop_backward(arguments: tuple[Array, ...], cotangents: tuple[Array, Array]) -> tuple[Array, ...]:
    """The gradient by the equations at the head of this file, after recomputing the state before each token."""
    A, h, u, dt, B, C = arguments
    last, before = lax.scan(lambda h, token: (_after(A, h, *token), h), h, (u, dt, B))
    after = jnp.concatenate([before[1:], last[None]])

    def step(carry, token):
        of_state, dA = carry
        h, u, dt, B, C, dy = token
        of_state = of_state + dy[:, None] * C[..., None]
        earlier = of_state * jnp.exp(dt[:, None] * A)
        of_decay = earlier * h
        of_input = _product("bdh,bd->bh", of_state, B)
        ddt = _sum_by_halves(of_decay * A) + u * of_input
        return (earlier, dA + dt[:, None] * of_decay), (dt * of_input, ddt, _product("bdh,bh->bd", of_state, dt * u))

    (dh, dA), (du, ddt, dB) = lax.scan(
        step, (cotangents[0], jnp.zeros_like(h)), (before, u, dt, B, C, cotangents[1]), reverse=True
    )
    dA = dA if A.shape[0] == h.shape[0] else dA.sum(0, keepdims=True)
    return dA, dh, du, ddt, dB, _product("cbdh,cbh->cbd", after, cotangents[1])


_differentiated_loop.defvjp(_loop_forward, _loop_backward)


def _after(A: Array, h: Array, u: Array, dt: Array, B: Array) -> Array:
    """The state [b,d,h] after a token with u and dt [b,h] and B [b,d]."""
    return h * jnp.exp(dt[:, None] * A) + (dt * u)[:, None] * B[..., None]


def _sum_by_halves(a: Array) -> Array:
    """The sum of [b,d,h] over d by adding one half to the other until one row is left, so that whole rows are added."""
    while (size := a.shape[1]) > 1:
        half = size // 2
        rest = a[:, 2 * half :]
        a = a[:, :half] + a[:, half : 2 * half]
        a = a if size == 2 * half else jnp.concatenate([a[:, :-1], a[:, -1:] + rest], 1)
    return a[:, 0]


def _product(axes: str, a: Array, b: Array) -> Array:
    return jnp.einsum(axes, a, b, precision="highest")


@partial(jax.jit, static_argnames=("spec", "config"))
def _with_gradient_of_loop(
    *operands: Array | None, spec: StateSpaceSpec = StateSpaceSpec(), config: RecurrenceConfig = RecurrenceConfig()
) -> Outputs:
    """The forward that the backward differentiates: it has a custom gradient, and thus no jvp, unlike `_loop`."""
    return _by_chunks(_differentiated_loop, Operands(*operands), config)


state_space_v1_jvp = tangent_of(state_space_v1, StateSpaceSpec(), Operands, Outputs)
state_space_v1_bwd = backward_of(state_space_v1, StateSpaceSpec(), Operands, Outputs, _with_gradient_of_loop)

register("state_space_v1", state_space_v1, state_space_v1_jvp, state_space_v1_bwd)
