"""Mamba-2's state space on TPU: forward, tangent and backward by the kernels of the linear recurrence."""

from ejkernel.kernels._pallas.tpu._recurrence import kernels
from ejkernel.kernels._state_space_v2 import by_kernels

state_space_v2, state_space_v2_jvp, state_space_v2_bwd = by_kernels(
    kernels.recurrence, kernels.recurrence_jvp, kernels.recurrence_bwd
)
