"""Linear recurrences in the form of ejkernel 0.0.78: the gated delta rule and the state spaces of Mamba."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from ..errors import shown, type_error, value_error
from ..types import CuSeqlens
from ._release import Present, arrays_of, run, translates
from .operations._arguments import require_dtype, static_bool, static_number
from .operations.gated_delta_rule import GatedDeltaRule
from .operations.ragged_gated_delta_rule import RaggedGatedDeltaRule

step_of_recurrence = RaggedGatedDeltaRule.call


@translates
def gated_delta_rule(present: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """The gated delta rule of query, key, value, beta, decay and initial_state, in this order.

    Sequences are computed in chunks and single tokens directly, whatever use_chunked is, since the results are the
    same. The state is float32.
    """
    names = ("q", "k", "v", "beta", "g", "initial_state", "use_qk_l2norm", "return_state")
    return run(present, call, {name: call[name] for name in names}, specs)


@translates
def ragged_gated_delta_rule(present: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """A step of serving with the arrays named as in 0.0.78. Returns (o, recurrent_state)."""
    names = {"query": "q", "key": "k", "value": "v", "decay": "g", "recurrent_state": "states"}
    of = ("query", "key", "value", "beta", "decay", "recurrent_state", "query_start_loc", "state_indices")
    arguments = {names.get(name, name): call[name] for name in of}
    specs = {names.get(name, name): spec for name, spec in specs.items()}
    if arguments["g"] is None:
        arguments["g"] = jnp.zeros_like(call["beta"])
    return run(present, call, arguments | dict(use_qk_l2norm=call["use_qk_l2norm"]), specs)


def gated_delta_rule_step(
    query: Float[Array, "batch heads 1 key_dim"],
    key: Float[Array, "batch heads 1 key_dim"],
    value: Float[Array, "batch heads 1 value_dim"],
    beta: Float[Array, "batch heads 1"],
    decay: Float[Array, "batch heads 1"] | None,
    recurrent_state: Float[Array, "batch heads key_dim value_dim"],
    use_qk_l2norm: bool = True,
) -> tuple[Float[Array, "batch heads 1 value_dim"], Float[Array, "batch heads key_dim value_dim"]]:
    """(o [B, H, 1, V], state) for one token [B, H, 1, ·], in the form of the function among 0.0.78's kernels."""
    arrays = (None if x is None else x.swapaxes(1, 2) for x in (query, key, value, beta, decay))
    o, state = GatedDeltaRule.call(*arrays, recurrent_state, use_qk_l2norm=use_qk_l2norm, return_state=True)
    return o.swapaxes(1, 2), state


def gated_delta_rule_decode(
    q: Float[Array, "sequences qk_heads key_dim"],
    k: Float[Array, "sequences qk_heads key_dim"],
    v: Float[Array, "sequences heads value_dim"],
    beta: Float[Array, "sequences heads"],
    g: Float[Array, "sequences heads"] | None,
    states: Float[Array, "slots heads key_dim value_dim"],
    state_indices: Integer[Array, " sequences"],
    use_qk_l2norm: bool,
) -> tuple[Float[Array, "sequences heads value_dim"], Float[Array, "slots heads key_dim value_dim"]]:
    """(o, states) for one token of each sequence, in the form of the function among 0.0.78's kernels."""
    cuts = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)
    return step_of_recurrence(q, k, v, beta, g, states, cuts, state_indices, use_qk_l2norm=use_qk_l2norm)


def gated_delta_rule_prefill(
    q: Float[Array, "tokens qk_heads key_dim"],
    k: Float[Array, "tokens qk_heads key_dim"],
    v: Float[Array, "tokens heads value_dim"],
    beta: Float[Array, "tokens heads"],
    g: Float[Array, "tokens heads"] | None,
    states: Float[Array, "slots heads key_dim value_dim"],
    query_start_loc: CuSeqlens,
    state_indices: Integer[Array, " sequences"],
    chunk_size: int,
    use_qk_l2norm: bool,
    compute_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "slots heads key_dim value_dim"], Float[Array, "tokens heads value_dim"]]:
    """(states, o) for packed sequences, in the form of the function among 0.0.78's kernels, with float32 products."""
    del chunk_size, compute_dtype
    o, states = step_of_recurrence(
        q, k, v, beta, g, states, query_start_loc, state_indices, use_qk_l2norm=use_qk_l2norm
    )
    return states, o


@translates
def state_space_v1(present: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """Mamba's state space. y is multiplied by act_fn(gate), by default silu. Returns (y, final state, conv_state)."""
    _check_options("state_space_v1", call)
    y, state = _run(present, call, specs)
    _check_gate("state_space_v1", y, *arrays_of(call, "gate"))
    return _gated(y, call), state, call["conv_state"]


@translates
def state_space_v2(present: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """Mamba-2's state space; returns (y [B, S, H · P], final state, conv_state unchanged).

    y is multiplied by act_fn(gate), by default silu, after a norm over all its features if use_gated_rmsnorm.
    """
    x, B, gate = arrays_of(call, "x", "B", "gate")
    _check_options("state_space_v2", call)
    if call["n_groups"] not in (None, B.shape[2]):
        raise value_error("state_space_v2", f"n_groups is {call['n_groups']}, but B has {B.shape[2]}", B=B)
    if call["use_gated_rmsnorm"] and gate is None:
        raise value_error("state_space_v2", "use_gated_rmsnorm is True but there is no gate, whose norm it is")
    y, state = _run(present, call, specs)
    y = y.reshape(*y.shape[:2], y.shape[2] * y.shape[3])
    _check_gate("state_space_v2", y, gate)
    if call["use_gated_rmsnorm"]:
        wide = y.astype(jnp.promote_types(y.dtype, jnp.float32))
        wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + call["rmsnorm_eps"])
        y = _gated(wide, {**call, "gate": gate.astype(wide.dtype)}).astype(x.dtype)
    else:
        y = _gated(y, call)
    return y, state, call["conv_state"]


def _run(present: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    names = ("x", "A", "B", "C", "D", "dt", "initial_state")
    if call["mesh"] is not None:
        raise value_error(present.__name__, "a mesh is given; call it inside jax.shard_map")
    return run(present, call, {name: call[name] for name in names} | dict(return_state=True), specs)


def _check_options(name: str, call: dict[str, Any]) -> None:
    """Raises unless act_fn can be called, use_gated_rmsnorm is a bool, and rmsnorm_eps a number ≥ 0."""
    if not (call["act_fn"] is None or callable(call["act_fn"])):
        raise type_error(name, f"act_fn is {shown(call['act_fn'])}; it must be a function of the gate, or None")
    static_bool(name, "use_gated_rmsnorm", call.get("use_gated_rmsnorm", False))
    if not 0 <= static_number(name, "rmsnorm_eps", call.get("rmsnorm_eps", 0)) < np.inf:
        raise value_error(name, f"rmsnorm_eps is {shown(call['rmsnorm_eps'])}; it must be at least 0, and finite")


def _check_gate(name: str, y: jax.Array, gate: Any) -> None:
    """Raises unless a gate is a float array of the shape of y, to which y could be broadcast otherwise."""
    require_dtype(name, np.floating, "a float type", gate=gate)
    if gate is not None and gate.shape != y.shape:
        raise value_error(name, f"gate must be {list(y.shape)}, as the result", gate=gate)


def _gated(y: jax.Array, call: dict[str, Any]) -> jax.Array:
    """y · act_fn(gate)."""
    if call["gate"] is None:
        return y
    act_fn = jax.nn.silu if call["act_fn"] is None else call["act_fn"]
    return y * act_fn(jnp.asarray(call["gate"])).astype(y.dtype)
