"""The gated delta rule in XLA: the formula, token by token, and the decomposition that is lowered, chunk by chunk.

With D_ij = Σ_{j<l≤i} g_l and P_i = Σ_{l≤i} g_l, the state after token i of a chunk with the initial state h is

    h_i = exp(P_i) h + Σ_{j≤i} exp(D_ij) k_j u_jᵀ,    u_i = β_i (v_i − exp(g_i) h_{i−1}ᵀ k_i)

Inserting the first equation into the second, the rows u of a chunk solve a unit lower triangular system,

    (I + L) U = diag(β) (V − diag(exp P) K h),    L_ij = β_i exp(D_ij) k_i·k_j for j < i

The paper's W and U are (I + L)⁻¹ diag(β exp P) K and (I + L)⁻¹ diag(β) V: here one product computes both. The inverse
is built from inverses of blocks, as a sum of powers of L overflows if keys are similar. Then,

    O = scale · (diag(exp P) Q h + (Q Kᵀ ∘ exp D, for j ≤ i) U),    h' = exp(P_c) h + (diag(exp D_c) K)ᵀ U

Everything is in float32. Derivatives are those of these equations, with a chunk recomputed from its tokens and its
initial state: the memory of a gradient is linear in the sequence.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.kernels._registry import configured_by
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec, Operands, Outputs
from ejkernel.types import Target
from ejkernel.types.recurrence import RecurrenceConfig
from ejkernel.xla_utils.symbolic import at_most

from ._attention import statistics_dtype, where
from ._decays import decay_of, times
from ._differentiated import backward_of, register, tangent_of
from ._sequence_chunks import initial_states, is_one_token, over_chunks, over_one_token, over_tokens
from ._tiles import varying_like

NORM_EPSILON = 1e-6


def reference(*operands: Array | None, spec: GatedDeltaRuleSpec = GatedDeltaRuleSpec()) -> Outputs:
    """The formula: one step for each token, in float32, or in float64 if the inputs are."""
    x = Operands(*operands)
    dtype = statistics_dtype(x.q.dtype)

    def step(h, of_token):
        q, k, v, beta, g = of_token
        h = h if g is None else h * jnp.exp(g)[..., None, None]
        u = beta[..., None] * (v - jnp.einsum("bhd,bhde->bhe", k, h, precision="highest"))
        h = h + k[..., None] * u[:, :, None]
        return h, spec.softmax_scale * jnp.einsum("bhd,bhde->bhe", q, h, precision="highest")

    q, k = (jnp.repeat(normalised(a.astype(dtype), spec), x.v.shape[2] // a.shape[2], axis=2) for a in (x.q, x.k))
    tokens = q, k, *(None if a is None else a.astype(dtype) for a in (x.v, x.beta, x.g))
    o, final_state = over_tokens(step, _initial_state(x, dtype), tokens, x.spans)
    return Outputs(o.astype(x.q.dtype), final_state)


def normalised(a: Array, spec: GatedDeltaRuleSpec) -> Array:
    """a / √(Σ a² + 1e-6) over the features, if the spec asks for it."""
    if not spec.use_qk_l2norm:
        return a
    return a * lax.rsqrt((a * a).sum(-1, keepdims=True) + NORM_EPSILON)


def _initial_state(x: Operands, dtype: Any) -> Array:
    """The initial states of all sequences, [b,n,h,d,e]."""
    state = (x.v.shape[2], x.q.shape[3], x.v.shape[3])
    return initial_states(x, x.initial_state, state, x.spans, dtype)


# --- Chunks -----------------------------------------------------------------------------------------------------------


def heuristic(spec: GatedDeltaRuleSpec, operands: Operands, target: Target) -> RecurrenceConfig:
    """chunk_size is the tokens of a chunk: short on a CPU, to compute less, and long elsewhere, to fill the device."""
    return RecurrenceConfig(chunk_size=32 if target.platform == "cpu" else 64)


def space(spec: GatedDeltaRuleSpec, operands: Operands, target: Target) -> list[RecurrenceConfig]:
    """The heuristic config and, except on a CPU, longer chunks, which store less and compute more."""
    if target.platform == "cpu":
        return [heuristic(spec, operands, target)]
    return [RecurrenceConfig(chunk_size=chunk_size) for chunk_size in (64, 32, 128)]


@configured_by(heuristic, space)
@partial(jax.jit, static_argnames=("spec", "config"))
def gated_delta_rule(
    *operands: Array | None,
    spec: GatedDeltaRuleSpec = GatedDeltaRuleSpec(),
    config: RecurrenceConfig = RecurrenceConfig(),
) -> Outputs:
    """o and the final state, chunk by chunk."""
    x = Operands(*operands)
    dtype = statistics_dtype(x.q.dtype)
    states = _initial_state(x, dtype)
    if x.v.size == 0:  # without tokens the states stay as they are
        return Outputs(varying_like(x, jnp.zeros(x.v.shape, x.q.dtype)), states)
    tokens = (x.q, x.k, x.v, x.beta, x.g)
    if is_one_token(x.q, x.spans):
        o, final = over_one_token(partial(of_token, dtype, spec), states, tokens)
        return Outputs(o.astype(x.q.dtype), final)
    size = max(1, at_most(config.chunk_size, x.q.shape[1]))

    def chunk(state, tokens):
        state, o = of_chunk(dtype, spec, state, tokens)
        return state, o.astype(x.q.dtype)

    return Outputs(*over_chunks(chunk, states, tokens, x.spans, size))


def of_token(dtype: Any, spec: GatedDeltaRuleSpec, state: Array, token: tuple) -> tuple[Array, Array]:
    """The state [b,h,d,e] after a token, and o [b,h,e], from q and k [b,g,d], v [b,h,e], beta and g [b,h].

    Queries are multiplied by the state before it, too, so that a state can be replaced in its place in memory.
    """
    q, k, v, beta, g = (None if a is None else a.astype(dtype) for a in token)
    q, k = (jnp.repeat(normalised(a, spec), v.shape[1] // a.shape[1], axis=1) for a in (q, k))
    q, decay = q * spec.softmax_scale, None if g is None else jnp.exp(g)
    retrieved, read = (times(_product("bhd,bhde->bhe", a, state), decay) for a in (k, q))
    u = beta[..., None] * (v - retrieved)
    return times(state, decay) + k[..., None] * u[:, :, None], read + (q * k).sum(-1, keepdims=True) * u


def of_chunk(dtype: Any, spec: GatedDeltaRuleSpec, state: Array, tokens: tuple) -> tuple[Array, Array]:
    """The state [b,h,d,e] after a chunk, and o [b,h,c,e], by the equations at the head of this file."""
    q, k, v, beta, g = tokens
    heads, c = v.shape[1:3]
    v, beta = v.astype(dtype), beta.astype(dtype)[..., None]
    q, k = (normalised(a.astype(dtype), spec) for a in (q, k))
    decay = decay_of(g, dtype)
    of_heads = lambda a: jnp.repeat(a, heads // a.shape[1], axis=1)
    among_keys = times(of_heads(_product("bhid,bhjd->bhij", k, k)), decay.between)
    weights = times(of_heads(_product("bhid,bhjd->bhij", q * spec.softmax_scale, k)), decay.between)
    weights = where(np.tri(c, dtype=bool)[None, None], weights, 0)
    q, k = of_heads(q * spec.softmax_scale), of_heads(k)
    retrieved = times(_product("bhid,bhde->bhie", k, state), decay.since)
    lower = where(np.tri(c, k=-1, dtype=bool)[None, None], beta * among_keys, 0)
    u = _product("bhij,bhje->bhie", unit_lower_inverse(lower), beta * (v - retrieved))
    o = times(_product("bhid,bhde->bhie", q, state), decay.since) + _product("bhij,bhje->bhie", weights, u)
    state = state if decay.total is None else state * lax.expand_dims(decay.total, (2, 3))
    return state + _product("bhjd,bhje->bhde", times(k, decay.until), u), o


@jax.custom_jvp
def unit_lower_inverse(lower: Array) -> Array:
    """(I + L)⁻¹ of a strictly lower triangular L [b,h,c,c], by the inverses of its diagonal blocks, from size 1 on:

        [A 0; C B]⁻¹ = [A⁻¹ 0; −B⁻¹ C A⁻¹ B⁻¹]

    Every factor is the inverse of a part of the matrix, so that nothing grows larger than the result. Some XLA backends
    make a triangular solve a loop over rows, which would be slower than everything else here.
    """
    c = lower.shape[-1]
    size = 1 << max(0, c - 1).bit_length()
    lower = lax.pad(lower, np.array(0, lower.dtype), [(0, 0, 0)] * 2 + [(0, size - c, 0)] * 2)
    matrices = math.prod(lower.shape[:2])
    # All blocks are along one axis, as XLA in jaxlib 0.11 fails on some products with more batch axes.
    inverse = lax.full_like(lower, 1, shape=(matrices * size, 1, 1))  # [b·h·blocks,n,n]
    n = 1
    while n < size:
        count = size // (2 * n)
        blocks = lower.reshape(matrices, count, 2 * n, count, 2 * n)[:, :, n:, :, :n]
        below = jnp.moveaxis(jnp.diagonal(blocks, axis1=1, axis2=3), -1, 1).reshape(matrices * count, n, n)
        first, second = jnp.moveaxis(inverse.reshape(matrices * count, 2, n, n), 1, 0)
        below = -_product("xij,xjk->xik", _product("xij,xjk->xik", second, below), first)
        above = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        inverse, n = jnp.concatenate([above, jnp.concatenate([below, second], -1)], -2), 2 * n
    return inverse.reshape(*lower.shape)[:, :, :c, :c]


@unit_lower_inverse.defjvp
def _inverse_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """The tangent of T = (I + L)⁻¹: T (I + L) = I gives dT = −T dL T."""
    inverse = unit_lower_inverse(*primals)
    change = _product("bhij,bhjk->bhik", _product("bhij,bhjk->bhik", inverse, *tangents), inverse)
    return inverse, -change


def _product(axes: str, a: Array, b: Array) -> Array:
    return jnp.einsum(axes, a, b, precision="highest")


gated_delta_rule_jvp = tangent_of(gated_delta_rule, GatedDeltaRuleSpec(), Operands, Outputs)
gated_delta_rule_bwd = backward_of(gated_delta_rule, GatedDeltaRuleSpec(), Operands, Outputs)

register("gated_delta_rule", gated_delta_rule, gated_delta_rule_jvp, gated_delta_rule_bwd)
