"""Mamba-2's state space on TPU: forward, tangent and backward by the kernels of the linear recurrence."""

from functools import partial

from jax import Array

from ejkernel.kernels import _state_space_v2 as around
from ejkernel.kernels._pallas.tpu._recurrence import kernels
from ejkernel.kernels._state_space_v2 import SPEC
from ejkernel.primitives.state_space_v2 import Operands, Outputs, StateSpaceSpec
from ejkernel.types import KernelConfig


def state_space_v2(*operands: Array | None, spec: StateSpaceSpec, config: KernelConfig) -> Outputs:
    """y and the final state."""
    return around.forward(partial(kernels.recurrence, spec=SPEC, config=config), Operands(*operands))


def state_space_v2_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: StateSpaceSpec, config: KernelConfig
) -> Outputs:
    """The tangents of y and the final state; a tangent of None is zero."""
    push = lambda x, dot: kernels.recurrence_jvp(x, None, dot, spec=SPEC, config=config)
    return around.tangent(push, primals, tangents)


def state_space_v2_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: StateSpaceSpec,
    config: KernelConfig,
) -> tuple[Array, ...]:
    """The cotangents of the operands named in `wrt`, in that order."""
    pull = lambda x, bar, wrt: kernels.recurrence_bwd(x, None, bar, wrt=wrt, spec=SPEC, config=config)
    return around.backward(pull, primals, cotangents, wrt)
