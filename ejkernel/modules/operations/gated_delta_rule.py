"""gated_delta_rule as an operation: from public arguments to operands and spec of the primitive, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...errors import value_error
from ...primitives.gated_delta_rule import GatedDeltaRuleSpec, Operands
from ...primitives.gated_delta_rule import gated_delta_rule as algorithm
from ...types import CuSeqlens, RecurrentState
from .._operation import Operation, Prepared
from ._arguments import (
    align,
    array,
    require_dtype,
    require_known,
    require_rank,
    require_same_dtype,
    static_bool,
    static_scale,
)
from ._recurrence import Recurrence, float_operand, spans_of, states_of

NAME = algorithm.name


def gated_delta_rule_arguments(
    q: Float[Array, "batch seq_len kv_heads head_dim"],
    k: Float[Array, "batch seq_len kv_heads head_dim"],
    v: Float[Array, "batch seq_len q_heads v_head_dim"],
    beta: Float[Array, "batch seq_len q_heads"],
    g: Float[Array, "batch seq_len q_heads"] | None = None,
    initial_state: RecurrentState | None = None,
    cu_seqlens: CuSeqlens | None = None,
    *,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = True,
    return_state: bool = False,
) -> Prepared[
    Float[Array, "batch seq_len q_heads v_head_dim"]
    | tuple[Float[Array, "batch seq_len q_heads v_head_dim"], RecurrentState]
]:
    """The gated delta rule: a recurrence over a state h [K, V], whose value at a key is replaced; computed in chunks.

        u_t = beta_t · (v_t − exp(g_t) · h_{t−1}ᵀ k_t)
        h_t = exp(g_t) · h_{t−1} + k_t u_tᵀ,    o_t = (softmax_scale · q_t)ᵀ h_t

    with q_t and k_t first divided by √(Σ x² + 1e-6), unless `use_qk_l2norm` is False. The tokens of a chunk are
    computed together by solving a triangular system (the WY form). Differentiable in every float array, the state
    included, to any order. A whole sequence at once, and one token at a time with the state passed on, give the same
    results.

    Args:
        q: queries [B, S, G, K].
        k: keys [B, S, G, K].
        v: values [B, S, H, V]; H is a multiple of G, and head h of the state uses head h // (H // G) of q and k. q, k
            and v have one float dtype.
        beta: floats [B, S, H], the fraction of the state's value at a key that is replaced: 0 for none, 1 for all.
        g: float log decay [B, S, H] of the whole state; usually at most 0, but any value is correct. 0 if not given.
        initial_state: [B, H, K, V], or [N, H, K, V] with cu_seqlens; 0 if not given. Kept in float32.
        cu_seqlens: [N + 1] integers, ascending, may be traced: B is 1 and sequence n is the tokens from entry n to
            entry n + 1.
        softmax_scale: K**-0.5 by default; a static number.
        use_qk_l2norm: whether q and k are normalised. The state may grow without bound if keys have norms above 1.
        return_state: also return the final state.

    Returns:
        o [B, S, H, V] in q's dtype, 0 for tokens past the last sequence, whose contents do not matter; with the final
        state, of the initial state's shape, in float32 if asked for. An empty sequence leaves its state as it was.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    Gated Delta Networks, arXiv 2412.06464; the WY form of the delta rule, 2406.06484.
    """
    q, k, v = (array(NAME, of, x) for of, x in (("q", q), ("k", k), ("v", v)))
    check_tokens(NAME, 4, "batch, length, heads, features", q, k, v)
    spans = spans_of(NAME, cu_seqlens, q)
    initial_state = states_of(NAME, initial_state, q, (v.shape[2], q.shape[3], v.shape[3]), spans)
    operands = Operands(q, k, v, *gates_of(NAME, beta, g, v), initial_state, spans)
    return_state = static_bool(NAME, "return_state", return_state)
    named = align(algorithm.forward, {of: x for of, x in operands._asdict().items() if x is not None})

    def finish(out: dict[str, Any]):
        o, final = out["o"], out["final_state"]
        final = final[:, 0] if spans is None else final[0]
        return (o, final) if return_state else o

    return Prepared(named, spec_of(NAME, q, softmax_scale, use_qk_l2norm), finish)


def spec_of(name: str, q: Any, softmax_scale: Any, use_qk_l2norm: Any) -> GatedDeltaRuleSpec:
    """The spec of a call, from its options."""
    if softmax_scale is None:
        require_known(name, "the number of features, of which softmax_scale is a power,", q.shape[-1], q=q)
        softmax_scale = q.shape[-1] ** -0.5
    scale = static_scale(name, softmax_scale, np.promote_types(q.dtype, np.float32))
    return GatedDeltaRuleSpec(scale, static_bool(name, "use_qk_l2norm", use_qk_l2norm))


def gates_of(name: str, beta: Any, g: Any, v: Any) -> tuple[Any, Any]:
    """The checked beta and g, with a number for each token and head of v; g may be None."""
    meaning = "one number for each token and head of v"
    beta = float_operand(name, "beta", array(name, "beta", beta), v.shape[:-1], meaning)
    return beta, float_operand(name, "g", g, v.shape[:-1], meaning)


def check_tokens(name: str, rank: int, axes: str, q: Any, k: Any, v: Any) -> None:
    """Raises unless q and k have one shape [..., heads, features], and the heads of v are a multiple of theirs."""
    shown = dict(q=q, k=k, v=v)
    require_rank(name, rank, axes, **shown)
    require_dtype(name, np.floating, "a float type", **shown)
    require_same_dtype(name, **shown)
    for of, x in shown.items():
        if 0 in x.shape[-2:]:
            raise value_error(
                name, f"{of} has {x.shape[-2]} heads of {x.shape[-1]} features; neither may be 0", **shown
            )
    if k.shape != q.shape:
        raise value_error(name, f"k is {k.shape} but q is {q.shape}; they must be equal", q=q, k=k)
    if v.shape[:-2] != q.shape[:-2]:
        tokens = "batch and length" if rank == 4 else "tokens"
        raise value_error(name, f"v has {tokens} {v.shape[:-2]} but q has {q.shape[:-2]}; they must be equal", q=q, v=v)
    if v.shape[-2] % q.shape[-2]:
        rule = "heads of v must be a multiple of those of q and k"
        raise value_error(name, f"v has {v.shape[-2]} heads but q has {q.shape[-2]}; {rule}", q=q, v=v)


class GatedDeltaRule(Recurrence, Operation):
    """The gated delta rule: `ejkernel.lax.gated_delta_rule` as a kernel object."""

    algorithm = algorithm
    prepare_arguments = staticmethod(gated_delta_rule_arguments)

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with two value heads for one head of queries and keys, with gates, that returns the final state."""
        q, v = (jax.ShapeDtypeStruct((1, 128, heads, 64), jnp.bfloat16) for heads in (1, 2))
        gate = jax.ShapeDtypeStruct(v.shape[:3], jnp.float32)
        return dict(q=q, k=q, v=v, beta=gate, g=gate, return_state=True)

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: GatedDeltaRuleSpec) -> dict[str, Any]:
        """Those of linear recurrences, with beta between 0 and 1."""
        values = super().synthetic_operands(operands, spec)
        return values | dict(beta=jax.nn.sigmoid(values["beta"].astype(jnp.float32)).astype(values["beta"].dtype))

    @classmethod
    def flops(cls, named: Mapping[str, Any], results: Sequence[str], spec: GatedDeltaRuleSpec) -> float:
        """2·d·e for each token, head and product: hᵀk, the update k uᵀ, and the output.

        A backward or tangent recomputes the first two, and differentiates all three in both of their factors.
        """
        (batch, length, heads, e), d = named["v"].shape, named["q"].shape[-1]
        return 2.0 * batch * length * heads * d * e * (3 if "o" in results else 8)
