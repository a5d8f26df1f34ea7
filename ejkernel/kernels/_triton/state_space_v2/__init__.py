"""Mamba-2's state space in Triton: the kernels of the linear recurrence.

What stands here imports neither Triton nor jax-triton; the kernels are imported when they are first needed.
"""

from ejkernel.kernels._state_space_v2 import refusal
from ejkernel.kernels._triton import _launch, _recurrence
from ejkernel.primitives.state_space_v2 import Operands, Outputs, StateSpaceSpec
from ejkernel.types import Target
from ejkernel.types.recurrence import RecurrenceConfig


def supports(spec: StateSpaceSpec, operands: Operands, target: Target) -> str | None:
    """Why no kernel can run on these operands (arrays or shapes), or None."""
    return refusal(_recurrence.supports, operands, target)


_kernels = _launch.trio(__name__, "state_space_v2", StateSpaceSpec, Operands, Outputs, RecurrenceConfig)

state_space_v2 = _kernels.forward("kernels", supports, ("fused_chunks", "chunks", "steps"))
state_space_v2_jvp = _kernels.tangent("kernels", supports, ("chunks",))
state_space_v2_bwd = _kernels.backward("kernels", supports, ("chunks",))

_kernels.register("state_space_v2", state_space_v2, state_space_v2_jvp, state_space_v2_bwd)
