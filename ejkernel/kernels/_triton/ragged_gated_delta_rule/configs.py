"""The configs of the kernels of ragged_gated_delta_rule: those of gated_delta_rule, for sequences of several tokens."""

from ejkernel.kernels._triton.gated_delta_rule import configs as dense
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec
from ejkernel.primitives.ragged_gated_delta_rule import Operands
from ejkernel.types import Target
from ejkernel.types.recurrence import RecurrenceConfig

from . import packed


def space(operation: str, operands: Operands, spec: GatedDeltaRuleSpec, target: Target) -> list[RecurrenceConfig]:
    """The configs worth measuring for a call (arrays or shapes), the most promising first."""
    del operation
    return dense.space("gated_delta_rule", packed(operands), spec, target)


def shared_memory(operation: str, operands: Operands, config: RecurrenceConfig) -> int:
    """Bytes of shared memory of the largest kernel."""
    del operation
    return dense.shared_memory("gated_delta_rule", packed(operands), config)
