"""ragged_gated_delta_rule in Triton, with states in their place in the pool (CUDA from sm_80 on, and ROCm).

Triton and jax-triton are imported only when the kernels are first needed.
"""

import jax

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton import gated_delta_rule as dense
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec
from ejkernel.primitives.gated_delta_rule import Operands as Dense
from ejkernel.primitives.ragged_gated_delta_rule import Operands, Outputs
from ejkernel.types import Target
from ejkernel.types.recurrence import RecurrenceConfig


def supports(spec: GatedDeltaRuleSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernels do not take the operands (arrays or shapes), or None."""
    if operands.state_indices.shape[1] == 0:
        return "no sequences"
    return dense.supports(spec, packed(operands), target)


def packed(x: Operands) -> Dense:
    """The types of the operands of gated_delta_rule for the tokens of a step."""
    spans = jax.ShapeDtypeStruct((*x.state_indices.shape, 2), x.state_indices.dtype)
    return Dense(x.q, x.k, x.v, x.beta, x.g, spans=spans)


_kernels = _launch.trio(__name__, "ragged_gated_delta_rule", GatedDeltaRuleSpec, Operands, Outputs, RecurrenceConfig)

ragged_gated_delta_rule = _kernels.forward("kernels", supports)

_kernels.register("ragged_gated_delta_rule", ragged_gated_delta_rule)
