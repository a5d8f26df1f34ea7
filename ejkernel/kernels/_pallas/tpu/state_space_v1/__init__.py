"""Mamba's selective state space on TPU: Pallas kernels, compiled by Mosaic.

Pallas is imported only when a kernel is first needed.
"""

from functools import partial

from ejkernel.kernels._kernel_trio import KernelTrio
from ejkernel.kernels._pallas.tpu import SMEM_BYTES, refuses
from ejkernel.primitives.state_space_v1 import Operands, Outputs, StateSpaceSpec
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.recurrence import RecurrenceConfig

LANES, MOST_NUMBERS = 128, 128


def supports(spec: StateSpaceSpec, operands: Operands, target: Target) -> str | None:
    """Why no kernel can run on these operands (arrays or shapes), or None."""
    from .configs import table_bytes

    if target.platform != "tpu":
        return f"Mosaic runs on tpu, not on {target.platform}"
    if operands.x.dtype.name not in ("bfloat16", "float32"):
        return f"x is {operands.x.dtype}; the kernels take bfloat16 and float32"
    (_, tokens, channels), numbers = operands.x.shape, operands.A.shape[2]
    if 0 in operands.x.shape or numbers == 0 or channels % LANES:
        return f"{channels} channels; the kernels take multiples of {LANES}, of some tokens and states"
    if numbers > MOST_NUMBERS:
        return f"a channel's state has {numbers} numbers; the kernels take up to {MOST_NUMBERS}"
    if tokens == 1:
        return "a single token: the kernels compute chunks of several"
    if (size := table_bytes(operands)) > SMEM_BYTES:
        return f"the table of chunks takes {size} bytes; scalar memory holds {SMEM_BYTES}"
    return None


_kernels = KernelTrio(
    __name__, "state_space_v1", StateSpaceSpec, Operands, Outputs, Platform.PALLAS, Backend.TPU, priority=100,
    config=RecurrenceConfig, refuses=partial(refuses, blocks=("chunk_size",)),
)  # fmt: skip

state_space_v1 = _kernels.forward("kernels", supports)
state_space_v1_jvp = _kernels.tangent("kernels", supports)
state_space_v1_bwd = _kernels.backward("kernels", supports)

_kernels.register("state_space_v1", state_space_v1, state_space_v1_jvp, state_space_v1_bwd)
