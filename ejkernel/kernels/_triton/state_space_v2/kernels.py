"""Mamba-2's state space in Triton: forward, tangent and backward by the kernels of the linear recurrence."""

from ejkernel.kernels._state_space_v2 import by_kernels
from ejkernel.kernels._triton._recurrence import forward, gradients, tangent

state_space_v2, state_space_v2_jvp, state_space_v2_bwd = by_kernels(
    forward.recurrence, tangent.recurrence_jvp, gradients.recurrence_bwd
)
