"""Mamba's selective state space in Triton, in scans of chunks (CUDA from sm_80 on, and ROCm).

Triton and jax-triton are imported only when a kernel is first needed.
"""

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.state_space_v1 import Operands, Outputs, StateSpaceSpec
from ejkernel.types import Target
from ejkernel.types.recurrence import RecurrenceConfig

MOST_NUMBERS, MOST_NUMBERS_OF_DERIVATIVES = 128, 32
"""Of the state of a channel: with more, registers spill."""


def supports(spec: StateSpaceSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward does not take the operands (arrays or shapes), or None."""
    return _reason("state_space_v1", operands, target, MOST_NUMBERS)


def supports_derivatives(spec: StateSpaceSpec, operands: Operands, target: Target) -> str | None:
    """Why the tangent and the backward do not take the operands, or None."""
    return _reason("state_space_v1_bwd", operands, target, MOST_NUMBERS_OF_DERIVATIVES)


def _reason(operation: str, operands: Operands, target: Target, most: int) -> str | None:
    if reason := _launch.refusal(target) or _launch.dtype_refusal("x", operands.x):
        return reason
    if 0 in operands.x.shape or 0 in operands.A.shape or (operands.spans is not None and 0 in operands.spans.shape):
        return "an empty batch, sequence or state"
    if (numbers := operands.A.shape[2]) > most:
        return f"a channel's state has {numbers} numbers; Triton's kernel takes up to {most}"
    if operands.x.shape[1] == 1:
        return "a single token: the kernels compute chunks of several"
    from .configs import least_memory

    return _launch.memory_refusal(least_memory(operation, operands), target)


_kernels = _launch.trio(__name__, "state_space_v1", StateSpaceSpec, Operands, Outputs, RecurrenceConfig)

state_space_v1 = _kernels.forward("forward", supports)
state_space_v1_jvp = _kernels.tangent("tangent", supports_derivatives)
state_space_v1_bwd = _kernels.backward("backward", supports_derivatives)

_kernels.register("state_space_v1", state_space_v1, state_space_v1_jvp, state_space_v1_bwd)
