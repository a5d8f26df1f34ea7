"""The gated delta rule on TPU, by the Pallas kernels of linear recurrences.

Pallas is imported only when a kernel is first needed.
"""

from ejkernel.kernels._pallas.tpu import _recurrence
from ejkernel.primitives._recurrence import RecurrenceSpec
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec, Operands, Outputs
from ejkernel.types import Target


def supports(spec: GatedDeltaRuleSpec, operands: Operands, target: Target) -> str | None:
    """Why no kernel can run on these operands (arrays or shapes), or None."""
    return _recurrence.supports(RecurrenceSpec(), operands, target)


_kernels = _recurrence.trio(__name__, "gated_delta_rule", GatedDeltaRuleSpec, Operands, Outputs)

gated_delta_rule = _kernels.forward("kernels", supports)
gated_delta_rule_jvp = _kernels.tangent("kernels", supports)
gated_delta_rule_bwd = _kernels.backward("kernels", supports)

_kernels.register("gated_delta_rule", gated_delta_rule, gated_delta_rule_jvp, gated_delta_rule_bwd)
