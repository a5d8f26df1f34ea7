"""Mamba-2's state space on TPU: the Pallas kernels of the linear recurrence.

Pallas is imported only when a kernel is first needed.
"""

from ejkernel.kernels._pallas.tpu import _recurrence
from ejkernel.kernels._state_space_v2 import refusal
from ejkernel.primitives.state_space_v2 import Operands, Outputs, StateSpaceSpec
from ejkernel.types import Target


def supports(spec: StateSpaceSpec, operands: Operands, target: Target) -> str | None:
    """Why no kernel can run on these operands (arrays or shapes), or None."""
    return refusal(_recurrence.supports, operands, target)


_kernels = _recurrence.trio(__name__, "state_space_v2", StateSpaceSpec, Operands, Outputs)

state_space_v2 = _kernels.forward("kernels", supports)
state_space_v2_jvp = _kernels.tangent("kernels", supports)
state_space_v2_bwd = _kernels.backward("kernels", supports)

_kernels.register("state_space_v2", state_space_v2, state_space_v2_jvp, state_space_v2_bwd)
