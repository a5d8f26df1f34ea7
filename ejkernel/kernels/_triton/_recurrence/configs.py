"""Which configs the kernels of the linear recurrence are run with: one by heuristics, and the space of tuning.

block_q is a chunk of tokens; block_k columns and block_d rows of a block of state. num_warps are those of the kernel
that computes chunks. algorithm is "walk", "chunks" or "steps".
"""

import numpy as np

from ejkernel.primitives._recurrence import Operands, RecurrenceSpec
from ejkernel.types import Backend, KernelConfig, Platform, Target

from .problem import padded
from .step import LONGEST

# (block_q, block_k, block_d, num_warps, num_stages, algorithm), the one that was fastest on an H200 first.
FORWARD = (
    (64, 64, 64, 4, 2, "walk"),
    (64, 64, 64, 4, 3, "walk"),
    (64, 128, 64, 4, 3, "chunks"),
    (128, 128, 64, 8, 2, "chunks"),
)
FORWARD_BY_FEATURE = ((64, 128, 64, 8, 2, "chunks"), (32, 64, 64, 4, 2, "chunks"))
BACKWARD = ((64, 64, 64, 4, 2, "chunks"), (64, 128, 64, 8, 3, "chunks"))
BACKWARD_BY_FEATURE = ((32, 64, 64, 4, 2, "chunks"), (64, 64, 64, 8, 3, "chunks"))


def heuristic(operation: str, operands: Operands, spec: RecurrenceSpec, target: Target) -> KernelConfig:
    """The config for a call (arrays or shapes) that was not tuned."""
    return space(operation, operands, spec, target)[0]


def space(operation: str, operands: Operands, spec: RecurrenceSpec, target: Target) -> list[KernelConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first."""
    s, d = operands.q.shape[1], operands.q.shape[3]
    if operation == "forward" and s <= LONGEST and operands.spans is None:
        return [_config(16, block, 64, warps, 1, "steps") for block, warps in ((32, 4), (16, 4), (64, 8))]
    wide = max(padded(d), padded(operands.v.shape[3])) > 128
    if operands.q.dtype != np.dtype("bfloat16") or wide:
        chunk, way = (16 if operands.q.dtype == np.float32 else 32), "chunks"
        return [_config(chunk, 32, 32, warps, 2, way) for warps in (4, 8)]
    if operation == "backward":
        table = BACKWARD_BY_FEATURE if operands.gk is not None else BACKWARD
    else:
        table = FORWARD_BY_FEATURE if operands.gk is not None else FORWARD
    return [_config(*values) for values in table]


def _config(block_q, block_k, block_d, num_warps, num_stages, algorithm) -> KernelConfig:
    return KernelConfig(
        block_q=block_q,
        block_k=block_k,
        block_d=block_d,
        num_warps=num_warps,
        num_stages=num_stages,
        platform=Platform.TRITON,
        backend=Backend.GPU,
        algorithm=algorithm,
    )
