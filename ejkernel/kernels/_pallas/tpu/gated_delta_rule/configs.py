"""The configs of the kernels of gated_delta_rule: those of a linear recurrence whose heads decay."""

from ejkernel.kernels._pallas.tpu._recurrence import configs
from ejkernel.primitives._recurrence import Operands as Recurrence
from ejkernel.primitives._recurrence import RecurrenceSpec
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec, Operands
from ejkernel.types import Target
from ejkernel.types.recurrence import RecurrenceConfig


def space(operation: str, operands: Operands, spec: GatedDeltaRuleSpec, target: Target) -> list[RecurrenceConfig]:
    """The configs worth measuring for a call (arrays or shapes), the most promising first."""
    of_recurrence = Recurrence(operands.q, operands.k, operands.v, operands.g)
    return configs.space(operation, of_recurrence, RecurrenceSpec(), target)
