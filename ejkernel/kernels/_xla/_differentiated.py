"""The tangent and the backward of an operation, as JAX's derivatives of its forward in XLA.

This is for a forward whose derivatives need no more memory than it does itself, as it recomputes the inside of a chunk.
Its first output has the dtype of its first operand; other outputs have the dtype of statistics.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._registry import configured_by, kernel_registry
from ejkernel.types import Backend, Platform
from ejkernel.types.recurrence import RecurrenceConfig

from ._attention import statistics_dtype


def register(
    operation: str, forward: Callable[..., Any], tangent: Callable[..., Any], backward: Callable[..., Any]
) -> None:
    """Registers the three as the implementation of an operation in XLA; their configs are those of the forward."""
    configured = configured_by(forward.heuristic, forward.space, forward.variants)
    for suffix, implementation in (("", forward), ("_jvp", configured(tangent)), ("_bwd", configured(backward))):
        kernel_registry.register(operation + suffix, Platform.XLA, Backend.ANY)(implementation)


def tangent_of(forward: Callable[..., Any], default: Any, operands: type, outputs: type) -> Callable[..., Any]:
    """A function (primals, outputs, tangents, spec, config) → tangents of the outputs; a tangent of None is zero.

    `default` is the spec of calls without one; `operands` and `outputs` are the types of the operation.
    """
    Spec, Operands, Outputs = type(default), operands, outputs

    def tangent(
        primals: Operands,
        outputs: Outputs,
        tangents: Operands,
        *,
        spec: Spec = default,
        config: RecurrenceConfig = RecurrenceConfig(),
    ) -> Outputs:
        moving = {name: t for name, t in tangents._asdict().items() if t is not None}
        f = partial(_outputs_of, forward, primals, spec, config)
        found = jax.jvp(f, ({name: getattr(primals, name) for name in moving},), (moving,))[1]
        return found._replace(o=found.o.astype(primals[0].dtype))

    return _as_of(forward, tangent, "_jvp")


def backward_of(
    forward: Callable[..., Any],
    default: Any,
    operands: type,
    outputs: type,
    differentiated: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """A function (primals, outputs, cotangents, wrt, spec, config) → cotangents of the operands named in `wrt`.

    `differentiated` replaces the forward where that has its own derivative rule. A cotangent of None is zero.

    The results are computed as the gradient of Σ outputs ∘ cotangents. `jax.vjp` would compare the types of cotangents
    and outputs, and in nested `shard_map`s the type of a computed value no longer has the axes over which it varies,
    while that of an argument has.
    """
    Spec, Operands, Outputs = type(default), operands, outputs
    function = differentiated or forward

    def backward(
        primals: Operands,
        outputs: Outputs,
        cotangents: Outputs,
        *,
        wrt: tuple[str, ...],
        spec: Spec = default,
        config: RecurrenceConfig = RecurrenceConfig(),
    ) -> tuple[Array, ...]:
        dtype = statistics_dtype(primals[0].dtype)

        def weighed(moving):
            pairs = zip(_outputs_of(function, primals, spec, config, moving), cotangents, strict=True)
            return sum((x * ct.astype(dtype)).sum() for x, ct in pairs if ct is not None)

        gradients = jax.grad(weighed)({name: getattr(primals, name) for name in wrt})
        return tuple(gradients[name] for name in wrt)

    return _as_of(forward, backward, "_bwd")


def _as_of(forward: Callable[..., Any], derivative: Callable[..., Any], suffix: str) -> Callable[..., Any]:
    """The derivative as a function of the forward's file, to which measured configs are keyed."""
    name = forward.__name__ + suffix
    derivative.__module__, derivative.__name__, derivative.__qualname__ = forward.__module__, name, name
    return jax.jit(derivative, static_argnames=("wrt", "spec", "config") if suffix == "_bwd" else ("spec", "config"))


def _outputs_of(forward: Callable[..., Any], operands: Any, spec: Any, config: Any, moving: dict[str, Array]) -> Any:
    """The outputs in the dtype of statistics, as a function of the operands that are differentiated.

    Nothing is rounded on the way: a second derivative that is transposed last would round terms to the dtype of q
    before they are summed, and float16 would overflow where large terms cancel.
    """
    dtype, x = statistics_dtype(operands[0].dtype), operands._replace(**moving)
    is_float = lambda a: a is not None and jnp.issubdtype(a.dtype, jnp.floating)
    wide = {name: a.astype(dtype) for name, a in x._asdict().items() if is_float(a)}
    return forward(*x._replace(**wide), spec=spec, config=config)
