"""The configs of the kernels of the linear recurrence: the heuristic choice, and the space that tuning searches.

chunk_size is the tokens of a chunk, block_v the columns and block_k the rows of a block of state, num_warps the warps
of the kernel that computes chunks. algorithm is "fused_chunks" (one kernel, chunk after chunk), "chunks" (chunk states,
then all chunks in parallel) or "steps" (token by token).
"""

import numpy as np

from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.primitives._recurrence import Operands, RecurrenceSpec
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.recurrence import RecurrenceConfig

from .problem import padded
from .step import LONGEST

SMALLEST = 16
"""The tokens of the smallest chunk that a matrix unit takes."""

WIDE = dict(chunk_size=SMALLEST, block_v=32, block_k=32, num_warps=8)
"""Blocks and warps of a backward in float32."""

WIDEST = 128
"""The most columns of a state that a program computes at once."""

# (chunk_size, block_v, block_k, num_warps, num_stages, algorithm), the fastest on an H200 first.
FORWARD = (
    (64, 64, 64, 4, 2, "fused_chunks"),
    (64, 64, 64, 4, 3, "fused_chunks"),
    (64, 128, 64, 4, 3, "chunks"),
    (128, 128, 64, 8, 2, "chunks"),
)
FORWARD_BY_FEATURE = ((64, 128, 64, 4, 3, "chunks"), (32, 128, 64, 4, 2, "chunks"))
FORWARD_BY_VALUE = ((32, 64, 64, 4, 2, "chunks"), (32, 64, 32, 4, 2, "chunks"))
TANGENT = ((64, 128, 64, 4, 1, "chunks"), (64, 128, 64, 8, 1, "chunks"))
TANGENT_BY_FEATURE = ((32, 128, 64, 8, 1, "chunks"), (32, 128, 64, 4, 1, "chunks"))
TANGENT_BY_VALUE = ((16, 64, 64, 4, 1, "chunks"), (16, 64, 32, 8, 1, "chunks"))
BACKWARD = ((64, 128, 64, 4, 2, "chunks"), (64, 64, 64, 8, 2, "chunks"))
BACKWARD_BY_FEATURE = ((64, 128, 32, 4, 2, "chunks"), (32, 128, 64, 4, 2, "chunks"))
BACKWARD_BY_VALUE = ((16, 64, 64, 4, 2, "chunks"), (16, 64, 32, 4, 2, "chunks"))

# The columns and warps of a program from token to token: for a single token, which is bound by memory, and for several.
STEPS = (((32, 4), (64, 4), (16, 4)), ((16, 1), (32, 2), (64, 4)))

# The entries of an operation are for decays of: nothing, or heads by g_gamma alone; heads by g; features of keys;
# features of values; features of both.
TABLES = {
    "recurrence": (FORWARD, FORWARD, FORWARD_BY_FEATURE, FORWARD_BY_VALUE, FORWARD_BY_VALUE),
    "recurrence_jvp": (TANGENT, TANGENT, TANGENT_BY_FEATURE, TANGENT_BY_VALUE, TANGENT_BY_VALUE),
    "recurrence_bwd": (BACKWARD, BACKWARD[::-1], BACKWARD_BY_FEATURE, BACKWARD_BY_VALUE, BACKWARD_BY_VALUE[::-1]),
}
# Without any decay the loop over chunks has shared memory for one more stage; up to 64 columns of values are one block,
# and the backward of decays of heads is best in the blocks of that without: 0.88, and 0.93 to 0.95 of the time.
WITHOUT_DECAY = (FORWARD[1], FORWARD[0], *FORWARD[2:])
ONE_BLOCK = 64
# The same for more than 128 features, which kernels take in blocks: of the configs that spill no more than 512 bytes of
# registers the fastest on an H200 first.
BY_VALUE, BY_VALUE_JVP = (SMALLEST, 32, 32, 8, 2, "chunks"), (SMALLEST, 32, 32, 8, 1, "chunks")
FORWARD_MANY, TANGENT_MANY = FORWARD[2:], ((64, 64, 64, 8, 1, "chunks"), (64, 64, 64, 4, 1, "chunks"))
MANY = {
    "recurrence": (FORWARD_MANY, FORWARD_MANY, FORWARD_BY_FEATURE, (BY_VALUE,), (BY_VALUE,)),
    "recurrence_jvp": (TANGENT_MANY, TANGENT_MANY, TANGENT_BY_FEATURE, (BY_VALUE_JVP,), (BY_VALUE_JVP,)),
    "recurrence_bwd": (BACKWARD, BACKWARD, BACKWARD_BY_FEATURE[::-1], (BY_VALUE,), (BY_VALUE,)),
}
MANY_ON_HOPPER = MANY | {
    "recurrence": (*MANY["recurrence"][:3], FORWARD_BY_VALUE, FORWARD_BY_VALUE),
    "recurrence_bwd": (BACKWARD, BACKWARD, BACKWARD_BY_FEATURE, *MANY["recurrence_bwd"][3:]),
}
BY_HEAD_JVP = (32, 32, 32, 8, 1, "chunks")
MANY_FROM_REGISTERS = MANY | {
    "recurrence_jvp": ((BY_HEAD_JVP,), (BY_HEAD_JVP,), *MANY["recurrence_jvp"][2:]),
}
# The same for up to 128 features on GPUs newer than Hopper, where the first of the backward spills registers.
ON_BLACKWELL = TABLES | {
    "recurrence_bwd": (*TABLES["recurrence_bwd"][:2], BACKWARD_BY_FEATURE[::-1], *TABLES["recurrence_bwd"][3:])
}
# The same for up to 128 features on GPUs whose matrix products take their operands from registers.
FUSED, MIDDLE = (64, 64, 64, 8, 2, "fused_chunks"), (32, 64, 64, 4, 2, "chunks")
BACKWARD_MIDDLE, TANGENT_MIDDLE = (32, 64, 64, 8, 2, "chunks"), (32, 64, 32, 8, 1, "chunks")
FROM_REGISTERS = {
    "recurrence": ((FUSED, MIDDLE), (FUSED, MIDDLE), FORWARD_BY_FEATURE[1:], FORWARD_BY_VALUE, FORWARD_BY_VALUE),
    "recurrence_jvp": (
        *((TANGENT_MIDDLE,), (TANGENT_MIDDLE,)),
        *(TANGENT_BY_FEATURE[:1], (BY_VALUE_JVP,), (BY_VALUE_JVP,)),
    ),
    "recurrence_bwd": (
        *((BACKWARD_MIDDLE,), (BACKWARD_MIDDLE,), (BACKWARD_MIDDLE,)),
        *(((SMALLEST, 64, 32, 8, 2, "chunks"),),) * 2,
    ),
}
# The same for float16, where a product is computed as three of TF32; with 32 columns of state the backward spills.
SMALL, NARROW = (SMALLEST, 32, 32, 4, 2, "chunks"), (SMALLEST, 16, 32, 8, 2, "chunks")
FLOAT16 = {
    "recurrence": ((MIDDLE,), (MIDDLE,), (MIDDLE,), FORWARD_BY_VALUE, FORWARD_BY_VALUE),
    "recurrence_jvp": ((SMALL,), (SMALL,), ((16, 64, 64, 4, 1, "chunks"), SMALL), TANGENT_BY_VALUE, TANGENT_BY_VALUE),
    "recurrence_bwd": ((NARROW,), (NARROW,), (BACKWARD_MIDDLE, SMALL), BACKWARD_BY_VALUE, BACKWARD_BY_VALUE[::-1]),
}


def space(operation: str, operands: Operands, spec: RecurrenceSpec, target: Target) -> list[RecurrenceConfig]:
    """The configs worth measuring for a call (arrays or shapes), the most promising first."""
    if operation == "recurrence" and operands.q.shape[1] <= LONGEST and operands.spans is None:
        return [_config(16, block, 64, warps, 1, "steps") for block, warps in STEPS[operands.q.shape[1] > 1]]
    if operands.gv is not None:
        by = 3 if operands.gk is None else 4
    else:
        by = 2 if operands.gk is not None else int(operands.g is not None)
    many, listed = padded(operands.q.shape[3]) > 128, operands.q.dtype.itemsize == 2
    if operands.q.dtype == np.float16:
        table, listed = FLOAT16, not many
    elif many and target.multiplies_from_registers:
        table = MANY_FROM_REGISTERS
    elif many:
        table = MANY_ON_HOPPER if target.compute_capability == 90 else MANY
    elif target.multiplies_from_registers:
        table = FROM_REGISTERS
    else:
        table = TABLES if (target.compute_capability or 0) < 100 else ON_BLACKWELL
    candidates = table[operation][by]
    if candidates is FORWARD and operands.g is operands.g_gamma is None:
        candidates = WITHOUT_DECAY
    if table in (TABLES, ON_BLACKWELL) and by == 1 and padded(operands.v.shape[3]) <= ONE_BLOCK:
        candidates = table[operation][0]
    limit = shared_memory_limit(target)
    fits_in = lambda config: shared_memory(operation, operands, config) <= limit
    fitting = [values for values in candidates if listed and fits_in(_config(*values))]
    if not fitting:
        chunk = 32 if operands.q.dtype != np.float32 and tiles_memory(operands, 32) <= limit else SMALLEST
        order = (8, 4) if many or operation == "recurrence_bwd" else (4, 8)
        fitting = [(chunk, 32, 32, warps, 2, "chunks") for warps in order]
    return [_config(*values) for values in fitting]


def fits(operands: Operands, target: Target) -> bool:
    """Whether the tiles of the smallest chunk and the state fit into the shared memory of the target."""
    return tiles_memory(operands, SMALLEST) <= shared_memory_limit(target)


def shared_memory(operation: str, operands: Operands, config: RecurrenceConfig) -> int:
    """Bytes of shared memory that the kernels need with this config: for a chunk, or for the loop over chunks."""
    return max(tiles_memory(operands, config.chunk_size), _loop_memory(operands, config))


def tiles_memory(operands: Operands, chunk: int) -> int:
    """Bytes of shared memory of the largest kernel: tiles of q, k, v and do, a state, and two [chunk, chunk] tiles."""
    d, e = padded(operands.q.shape[3]), min(padded(operands.v.shape[3]), WIDEST)
    elements = 2 * chunk * (d + e) + d * e + 2 * chunk**2
    return elements * (2 if operands.q.dtype == np.dtype("bfloat16") and operands.gv is None else 4)


def _loop_memory(operands: Operands, config: RecurrenceConfig) -> int:
    """Bytes of the loop over chunks: for each stage tiles of k, v and gates, and the state twice in float32.

    The fused one has q too, and a state of all features and two [chunk, chunk] tiles in the dtype of q.
    """
    chunk, d, e = config.chunk_size, padded(operands.q.shape[3]), min(config.block_v, padded(operands.v.shape[3]))
    size, numbers = operands.q.dtype.itemsize, config.num_stages * 4 * chunk
    if config.algorithm == "fused_chunks":
        return (config.num_stages * chunk * (2 * d + e) + d * e + 2 * chunk**2) * size + numbers
    d = min(config.block_k, d)
    gates = (d if operands.gk is not None else 0) + (e if operands.gv is not None else 0)
    return config.num_stages * chunk * (d + e + gates) * size + 8 * d * e + numbers


def _config(chunk_size, block_v, block_k, num_warps, num_stages, algorithm) -> RecurrenceConfig:
    return RecurrenceConfig(
        chunk_size=chunk_size,
        block_v=block_v,
        block_k=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
        platform=Platform.TRITON,
        backend=Backend.GPU,
        algorithm=algorithm,
    )
