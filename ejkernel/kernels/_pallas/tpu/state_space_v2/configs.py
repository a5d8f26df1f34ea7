"""The configs of the kernels of state_space_v2: those of the linear recurrence."""

from ejkernel.kernels._pallas.tpu._recurrence import configs
from ejkernel.kernels._state_space_v2 import SPEC, shapes_of
from ejkernel.primitives.state_space_v2 import Operands, StateSpaceSpec
from ejkernel.types import Target
from ejkernel.types.recurrence import RecurrenceConfig


def space(operation: str, operands: Operands, spec: StateSpaceSpec, target: Target) -> list[RecurrenceConfig]:
    """The configs worth measuring for a call (arrays or shapes), the most promising first."""
    operation = operation.replace("state_space_v2", "recurrence")
    return configs.space(operation, shapes_of(operands), SPEC, target)
