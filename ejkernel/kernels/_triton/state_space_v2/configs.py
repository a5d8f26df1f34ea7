"""Which configs the kernels are run with: those of the recurrence that they compute."""

from ejkernel.kernels._state_space_v2 import SPEC, shapes_of
from ejkernel.kernels._triton._recurrence import configs
from ejkernel.primitives.state_space_v2 import Operands, StateSpaceSpec
from ejkernel.types import Target
from ejkernel.types.recurrence import RecurrenceConfig


def space(operation: str, operands: Operands, spec: StateSpaceSpec, target: Target) -> list[RecurrenceConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first."""
    return configs.space(_of_recurrence(operation), shapes_of(operands), SPEC, target)


def shared_memory(operation: str, operands: Operands, config: RecurrenceConfig) -> int:
    """Bytes of shared memory that a config takes."""
    return configs.shared_memory(_of_recurrence(operation), shapes_of(operands), config)


def _of_recurrence(operation: str) -> str:
    return operation.replace("state_space_v2", "recurrence")
