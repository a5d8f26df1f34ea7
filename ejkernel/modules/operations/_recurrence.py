"""The linear recurrence operations' common path from public arguments to the operands of the primitive."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import value_error
from ...ops.core.kernel import KERNELS
from ...ops.execution.executor import call_context
from ...ops.utils.operands import random_like
from ...primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ...primitives._trio import Trio
from ...types.recurrence import RecurrenceConfig
from .._operation import Prepared, platform_of_call
from ._arguments import (
    align,
    array,
    int32,
    require_cuts,
    require_dtype,
    require_known,
    require_rank,
    require_same_dtype,
    static_bool,
    static_scale,
)
from ._sequence_shards import final_states, linked, shards_of, with_initial_states

_OF_STATE = "heads, features of k, features of v"


def prepare(
    algorithm: Trio,
    q: Any,
    k: Any,
    v: Any,
    *,
    g: Any = None,
    gk: Any = None,
    gv: Any = None,
    g_gamma: Any = None,
    initial_state: Any,
    cu_seqlens: Any,
    softmax_scale: Any,
    reverse: Any,
    return_state: Any,
    axis_name: Any,
) -> Prepared:
    """A checked call of one of the linear recurrence operations."""
    name = algorithm.name
    reverse, return_state = static_bool(name, "reverse", reverse), static_bool(name, "return_state", return_state)
    q, k, v = (array(name, of, x) for of, x in (("q", q), ("k", k), ("v", v)))
    _check_tokens(name, q, k, v)
    batch, length, heads, d = q.shape
    dtype = np.promote_types(q.dtype, np.float32)  # of statistics; JAX's promotion may be set to strict, and raise
    spans = spans_of(name, cu_seqlens, q)
    shards = None if axis_name is None else shards_of(name, axis_name, cu_seqlens, q, reverse)
    if spans is not None and shards is not None:
        spans = shards.spans
    initial_state = states_of(name, initial_state, q, (heads, d, v.shape[-1]), spans)
    g_gamma = float_operand(name, "g_gamma", g_gamma, (heads,), "one number for each head of q")
    result, traced = q.dtype, isinstance(softmax_scale, jax.Array | jax.core.Tracer)
    if traced and q.dtype == jnp.float16:  # whose range may be too small for q · scale
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    q, scale = _scaled(name, q, softmax_scale, spans)
    operands = Operands(
        q,
        k,
        v,
        g=float_operand(name, "g", g, (batch, length, heads), "one number for each token and head of q"),
        gk=float_operand(name, "gk", gk, q.shape, "the shape of q"),
        gv=float_operand(
            name, "gv", gv, (batch, length, heads, v.shape[-1]), "features of v for each token and head of q"
        ),
        g_gamma=None if g_gamma is None else g_gamma.astype(dtype)[None],
        initial_state=initial_state,
        spans=spans,
    )
    spec, links = RecurrenceSpec(softmax_scale=scale, reverse=reverse, return_state=return_state), None
    of_shard = _recurrence_as_asked(algorithm)
    if shards is not None:
        operands, links = with_initial_states(shards, operands, partial(of_shard, replace(spec, return_output=False)))
    named = align(algorithm.forward, {of: x for of, x in operands._asdict().items() if x is not None})

    def finish(out: dict[str, Any]):
        results = Outputs(**out)
        if links is not None:
            results = linked(links, operands, results, partial(of_shard, spec))
        o, final = results
        o, final = o.astype(result), final[:, 0] if spans is None else final[0]
        if not return_state:
            return o
        return o, final if shards is None else final_states(shards, final)

    return Prepared(named, spec, finish)


def _recurrence_as_asked(algorithm: Trio) -> Callable[[RecurrenceSpec, Operands], Outputs]:
    """The recurrence over the tokens of this device, with the executor, config and platform of the call."""
    context, platform = call_context(), platform_of_call()

    def run(spec: RecurrenceSpec, operands: Operands) -> Outputs:
        named = align(algorithm.forward, {of: x for of, x in operands._asdict().items() if x is not None})
        inv = KERNELS[algorithm.name].invocation(named, spec, platform=platform)
        return Outputs(**context.executor.run(inv, context.cfg))

    return run


def _check_tokens(name: str, q, k, v) -> None:
    shown = dict(q=q, k=k, v=v)
    require_rank(name, 4, "batch, length, heads, features", **shown)
    require_dtype(name, np.floating, "a float type", **shown)
    require_same_dtype(name, **shown)
    for of, x in shown.items():
        if 0 in x.shape[2:]:
            raise value_error(name, f"{of} has {x.shape[2]} heads of {x.shape[3]} features; neither may be 0", **shown)
    for of, x in (("k", k), ("v", v)):
        if x.shape[:2] != q.shape[:2]:
            raise value_error(
                name, f"{of} has batch and length {x.shape[:2]} but q has {q.shape[:2]}; they must be equal", **shown
            )
    if k.shape[-1] != q.shape[-1]:
        raise value_error(name, f"k has {k.shape[-1]} features but q has {q.shape[-1]}; they must be equal", q=q, k=k)
    if v.shape[2] != k.shape[2]:
        raise value_error(name, f"v has {v.shape[2]} heads but k has {k.shape[2]}; they must be equal", k=k, v=v)
    if q.shape[2] % k.shape[2]:
        raise value_error(
            name,
            f"k has {k.shape[2]} heads but q has {q.shape[2]}; query heads must be a multiple of key/value heads",
            q=q,
            k=k,
        )


def float_operand(name: str, of: str, x, shape: tuple[int, ...], meaning: str):
    """The operand `of` as a float array of a given shape, or None if it is absent."""
    if x is None:
        return None
    x = array(name, of, x)
    require_dtype(name, np.floating, "a float type", **{of: x})
    if x.shape != shape:
        raise value_error(name, f"{of} must be {shape}, {meaning}", **{of: x})
    return x


def states_of(name: str, given: Any, q: Any, shape: tuple[int, ...], spans: Any, axes: str = _OF_STATE) -> Any:
    """initial_state as [batch, 1, …] or [1, sequences, …] in the dtype of statistics; None if it is absent."""
    sequences = q.shape[0] if spans is None else spans.shape[1]
    meaning = f"({'batch' if spans is None else 'sequences'}, {axes})"
    given = float_operand(name, "initial_state", given, (sequences, *shape), meaning)
    if given is None:
        return None
    given = given.astype(np.promote_types(q.dtype, np.float32))
    return given[:, None] if spans is None else given[None]


def spans_of(name: str, cu_seqlens, q, of: str = "q"):
    """The begin and end of each sequence, [1, n, 2], clipped to the number of tokens."""
    if cu_seqlens is None:
        return None
    cu_seqlens = array(name, "cu_seqlens", cu_seqlens)
    require_cuts(name, cu_seqlens=cu_seqlens)
    if q.shape[0] != 1:
        raise value_error(
            name,
            f"{of} has batch {q.shape[0]}; it must be 1 since cu_seqlens divides its tokens into sequences",
            **{of: q},
        )
    ends = int32(cu_seqlens).clip(0, q.shape[1])
    return jnp.stack([ends[:-1], ends[1:]], axis=-1)[None]


def _scaled(name: str, q, scale, spans):
    """q and the static scale. A traced scale is multiplied into q, with q set to 0 for tokens of no sequence.

    Those tokens may be NaN, and the gradient of the scale would contain their products with cotangents of 0: NaN.
    """
    if scale is None:
        require_known(name, "the number of features, of which softmax_scale is a power,", q.shape[-1], q=q)
        return q, q.shape[-1] ** -0.5
    if isinstance(scale, jax.Array | jax.core.Tracer):
        if scale.shape != ():
            raise value_error(name, "softmax_scale must be a scalar", softmax_scale=scale)
        require_dtype(name, np.floating, "a float type", softmax_scale=scale)
        dtype = np.promote_types(q.dtype, np.float32)
        if spans is not None:
            token = jnp.arange(q.shape[1], dtype=jnp.int32)
            inside = (token >= spans[0, 0, 0]) & (token < spans[0, -1, 1])
            q = jnp.where(inside[:, None, None], q, jnp.zeros((), q.dtype))
        return (q.astype(dtype) * scale.astype(dtype)).astype(q.dtype), 1.0
    return q, static_scale(name, scale, np.promote_types(q.dtype, np.float32))


def synthetic_spans(operands: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """The spans of sequences of unequal lengths, if the call has spans."""
    if "spans" not in operands:
        return {}
    shape = operands["spans"].shape
    ends = np.round(tokens * np.linspace(0, 1, shape[1] + 1) ** 1.5).astype(np.int32)
    return {"spans": jnp.broadcast_to(jnp.stack([ends[:-1], ends[1:]], axis=-1), shape)}


class Recurrence:
    """The configs, example, synthetic operands and flops of linear recurrences, for tuning and the doctor."""

    config_class = RecurrenceConfig

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with q, k and v of a few chunks that returns the final state too."""
        q, kv = (jax.ShapeDtypeStruct((1, 128, heads, 64), jnp.bfloat16) for heads in (2, 1))
        return dict(q=q, k=kv, v=kv, return_state=True)

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Random arrays, with gates that halve a state in about sixteen tokens and sequences of unequal lengths."""
        values = random_like({name: x for name, x in operands.items() if name != "spans"})
        for name in values.keys() & {"g", "gk", "gv", "g_gamma"}:
            wide = values[name].astype(jnp.float32)
            values[name] = (jax.nn.log_sigmoid(wide) / 16).astype(values[name].dtype)
        return values | synthetic_spans(operands, operands["q"].shape[1])

    @classmethod
    def flops(cls, named: Mapping[str, Any], results: Sequence[str], spec: RecurrenceSpec) -> float:
        """2·d·e for each token, head and product; the forward has two products, k vᵀ and the state times q.

        A backward or tangent recomputes the states; each of q, k and v in which it differentiates adds a product, and
        k or v adds one more, for the tangent or cotangent of the state.
        """
        (batch, length, heads, d), e = named["q"].shape, named["v"].shape[-1]
        moving = [f"{name}_dot" in named or f"{name}_bar" in results for name in "qkv"]
        products = 2 if "o" in results else 1 + sum(moving) + any(moving[1:])
        return 2.0 * batch * length * heads * d * e * products
