"""ragged_gated_delta_rule as an operation: from public arguments to operands and spec of the primitive, and back."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from ...errors import value_error
from ...ops.utils.operands import random_like
from ...primitives.gated_delta_rule import GatedDeltaRuleSpec
from ...primitives.ragged_gated_delta_rule import Operands
from ...primitives.ragged_gated_delta_rule import ragged_gated_delta_rule as primitives
from ...types import CuSeqlens
from ...types.recurrence import RecurrenceConfig
from .._operation import Operation, Prepared
from ._arguments import align, array, int32, require_cuts, require_dtype, require_rank
from .gated_delta_rule import check_tokens, gates_of, spec_of

NAME = primitives.name


def ragged_gated_delta_rule_arguments(
    q: Float[Array, "tokens kv_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens q_heads v_head_dim"],
    beta: Float[Array, "tokens q_heads"],
    g: Float[Array, "tokens q_heads"] | None,
    states: Float[Array, "slots q_heads head_dim v_head_dim"],
    query_start_loc: CuSeqlens,
    state_indices: Integer[Array, " sequences"],
    *,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = True,
) -> Prepared[tuple[Float[Array, "tokens q_heads v_head_dim"], Float[Array, "slots q_heads head_dim v_head_dim"]]]:
    """A step of serving with the gated delta rule, for packed tokens of several sequences whose states are in a pool.

        u_t = beta_t · (v_t − exp(g_t) · h_{t−1}ᵀ k_t)
        h_t = exp(g_t) · h_{t−1} + k_t u_tᵀ,    o_t = (softmax_scale · q_t)ᵀ h_t

    with q_t and k_t first divided by √(Σ x² + 1e-6), unless `use_qk_l2norm` is False. The initial h of sequence n is
    read from the pool at state_indices[n], and its final h is written there. Prefill, chunks of a prefill and decode
    may be mixed in a step. Forward only: it has no derivative. If states is donated to a compiled program, the pool is
    updated in place and the other states are not touched; without donation XLA copies it.

    Args:
        q: the queries [T, G, K] of the step's tokens, one sequence after the other.
        k: their keys [T, G, K].
        v: their values [T, H, V]; H is a multiple of G, and head h of the state uses head h // (H // G) of q and k. q,
            k and v have one float dtype.
        beta: floats [T, H], the fraction of the state's value at a key that is replaced.
        g: float log decay [T, H] of the whole state, or None for no decay.
        states: the pool [slots, H, K, V], of a float dtype, to which states are rounded between steps.
        query_start_loc: [N + 1] integers, ascending: sequence n has the tokens from entry n to entry n + 1. The state
            of a sequence without tokens does not change.
        state_indices: [N] integers: where the state of each sequence is in the pool; sequences with tokens must have
            different indices. A sequence with an index outside the pool begins with a state of 0, which is not stored.
        softmax_scale: K**-0.5 by default; a static number.
        use_qk_l2norm: whether q and k are normalised.

    Returns:
        (o [T, H, V] in q's dtype, 0 for tokens of no sequence; the new states, in the shape and dtype of states).

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        NotImplementedError: a derivative is asked for.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    Gated Delta Networks, arXiv 2412.06464.
    """
    q, k, v = (array(NAME, of, x) for of, x in (("q", q), ("k", k), ("v", v)))
    check_tokens(NAME, 3, "tokens, heads, features", q, k, v)
    beta, g = gates_of(NAME, beta, g, v)
    states = array(NAME, "states", states)
    _check_states(states, q, v)
    cuts, slots = (
        array(NAME, of, x) for of, x in (("query_start_loc", query_start_loc), ("state_indices", state_indices))
    )
    require_cuts(NAME, query_start_loc=cuts)
    require_dtype(NAME, np.integer, "an integer type", state_indices=slots)
    if slots.shape != (cuts.shape[0] - 1,):
        rule = f"it must be [{cuts.shape[0] - 1}], one place for each sequence"
        raise value_error(NAME, f"state_indices is {slots.shape}; {rule}", query_start_loc=cuts, state_indices=slots)
    operands = Operands(q, k, v, beta, states, int32(cuts), int32(slots), g)
    named = align(primitives.forward, {of: x[None] for of, x in operands._asdict().items() if x is not None})
    finish = lambda out: (out["o"][0], out["new_states"][0])
    return Prepared(named, spec_of(NAME, q, softmax_scale, use_qk_l2norm), finish)


def _check_states(states: Any, q: Any, v: Any) -> None:
    require_rank(NAME, 4, "slots, heads, features of k, features of v", states=states)
    require_dtype(NAME, np.floating, "a float type", states=states)
    wanted = (v.shape[1], q.shape[2], v.shape[2])
    if states.shape[1:] != wanted or states.shape[0] == 0:
        raise value_error(NAME, f"states must be [slots, {', '.join(map(str, wanted))}]", q=q, v=v, states=states)


class RaggedGatedDeltaRule(Operation):
    """A step of serving with the gated delta rule: `ejkernel.lax.ragged_gated_delta_rule` as a kernel object."""

    algorithm = primitives
    config_class = RecurrenceConfig
    prepare_arguments = staticmethod(ragged_gated_delta_rule_arguments)

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with four sequences that share 128 tokens, and a pool of eight states."""
        array = jax.ShapeDtypeStruct
        q, v = (array((128, heads, 64), jnp.bfloat16) for heads in (1, 2))
        gate, states = array((128, 2), jnp.float32), array((8, 2, 64, 64), jnp.float32)
        tables = dict(query_start_loc=array((5,), jnp.int32), state_indices=array((4,), jnp.int32))
        return dict(q=q, k=q, v=v, beta=gate, g=gate, states=states, **tables)

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: GatedDeltaRuleSpec) -> dict[str, Any]:
        """Random arrays; sequences have equal shares of the tokens, and different states of the pool."""
        del spec
        values = random_like({n: x for n, x in operands.items() if n not in ("query_start_loc", "state_indices")})
        wide = lambda name, f: f(values[name].astype(jnp.float32)).astype(values[name].dtype)
        values["beta"] = wide("beta", jax.nn.sigmoid)
        if "g" in values:
            values["g"] = wide("g", lambda a: jax.nn.log_sigmoid(a) / 16)
        cuts, slots = operands["query_start_loc"], operands["state_indices"]
        ends = np.linspace(0, operands["q"].shape[1], cuts.shape[1]).astype(np.int32)
        places = np.arange(slots.shape[1], dtype=np.int32) % operands["states"].shape[1]
        of_batch = lambda a, like: jnp.broadcast_to(jnp.asarray(a), like.shape)
        return values | dict(query_start_loc=of_batch(ends, cuts), state_indices=of_batch(places, slots))
