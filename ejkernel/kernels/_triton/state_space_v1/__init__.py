"""Mamba's selective state space in Triton, token by token in registers (CUDA from sm_80 on, and ROCm).

Triton and jax-triton are imported only when a kernel is first needed.
"""

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.state_space_v1 import Operands, Outputs, StateSpaceSpec
from ejkernel.types import Target
from ejkernel.types.recurrence import RecurrenceConfig

MOST_NUMBERS = 128
"""Of the state of a channel."""


def supports(spec: StateSpaceSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernels do not take the operands (arrays or shapes), or None."""
    if reason := _launch.refusal(target) or _launch.dtype_refusal("x", operands.x):
        return reason
    if 0 in operands.x.shape or 0 in operands.A.shape or (operands.spans is not None and 0 in operands.spans.shape):
        return "an empty batch, sequence or state"
    if (numbers := operands.A.shape[2]) > MOST_NUMBERS:
        return f"a channel's state has {numbers} numbers; Triton's kernels take up to {MOST_NUMBERS}"
    from .configs import least_memory

    return _launch.memory_refusal(least_memory("state_space_v1", operands), target)


_kernels = _launch.trio(__name__, "state_space_v1", StateSpaceSpec, Operands, Outputs, RecurrenceConfig)

state_space_v1 = _kernels.forward("forward", supports)
state_space_v1_jvp = _kernels.tangent("tangent", supports)
state_space_v1_bwd = _kernels.backward("backward", supports)

_kernels.register("state_space_v1", state_space_v1, state_space_v1_jvp, state_space_v1_bwd)
