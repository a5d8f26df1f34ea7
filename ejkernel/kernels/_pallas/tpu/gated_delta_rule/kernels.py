"""The gated delta rule on TPU: forward, tangent and backward by the kernels of linear recurrences."""

from typing import Any

from jax import Array

from ejkernel.kernels._pallas.tpu._recurrence import kernels
from ejkernel.primitives._recurrence import Operands as Recurrence
from ejkernel.primitives._recurrence import Outputs as OfRecurrence
from ejkernel.primitives._recurrence import RecurrenceSpec
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec, Operands, Outputs
from ejkernel.types.recurrence import RecurrenceConfig


def gated_delta_rule(*operands: Array | None, spec: GatedDeltaRuleSpec, config: RecurrenceConfig) -> Outputs:
    """o and the final state."""
    x = Operands(*operands)
    return Outputs(*kernels.recurrence(*_recurrence(x), beta=x.beta, config=config, **_options(spec)))


def gated_delta_rule_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: GatedDeltaRuleSpec, config: RecurrenceConfig
) -> Outputs:
    """The tangents of both."""
    how = dict(beta=(primals.beta, tangents.beta), config=config, **_options(spec))
    return Outputs(*kernels.recurrence_jvp(_recurrence(primals), None, _recurrence(tangents), **how))


def gated_delta_rule_bwd(
    primals: Operands, outputs: Outputs, cotangents: Outputs, *, wrt: tuple[str, ...], spec: GatedDeltaRuleSpec,
    config: RecurrenceConfig,
) -> tuple[Array, ...]:  # fmt: skip
    """The cotangents of the operands named in `wrt`, in that order."""
    how = dict(wrt=wrt, beta=primals.beta, config=config, **_options(spec))
    return kernels.recurrence_bwd(_recurrence(primals), None, OfRecurrence(*cotangents), **how)


def _recurrence(x: Operands) -> Recurrence:
    """The operands that a linear recurrence has, too."""
    return Recurrence(x.q, x.k, x.v, x.g, initial_state=x.initial_state, spans=x.spans)


def _options(spec: GatedDeltaRuleSpec) -> dict[str, Any]:
    return dict(spec=RecurrenceSpec(softmax_scale=spec.softmax_scale), normalises=spec.use_qk_l2norm)
