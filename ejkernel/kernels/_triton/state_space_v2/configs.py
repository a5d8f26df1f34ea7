"""Which configs the kernels are run with: those of the recurrence, except for forward and backward in bfloat16."""

import numpy as np

from ejkernel.kernels._state_space_v2 import SPEC, dtype_of_products, shapes_of
from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.kernels._triton._recurrence import configs
from ejkernel.kernels._triton._recurrence.step import LONGEST
from ejkernel.primitives.state_space_v2 import Operands, StateSpaceSpec
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.recurrence import RecurrenceConfig

ROWS, FEATURES = 128, 64
"""The most features of B and C that kernels which share q·k take at once, and those of the others."""

# (chunk_size, num_warps, num_stages), the likeliest first; on an H200 by measurement, elsewhere without spills.
ON_HOPPER = {
    "state_space_v2": ((64, 4, 3), (64, 4, 2), (32, 4, 2)),
    "state_space_v2_bwd": ((64, 4, 2), (64, 4, 3), (32, 4, 2)),
}
ON_BLACKWELL = ((64, 8, 2), (64, 8, 1))
FROM_REGISTERS = ((32, 4, 2), (64, 4, 2))
# Where none of these fits into the shared memory of the target, with the columns of x that are taken at once.
SMALL = ((32, 4, 1, 64), (16, 4, 1, 64), (16, 4, 1, 32), (16, 4, 1, 16))


def space(operation: str, operands: Operands, spec: StateSpaceSpec, target: Target) -> list[RecurrenceConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first."""
    if not has_own_kernels(operation, operands):
        return configs.space(_of_recurrence(operation), shapes_of(operands), SPEC, target)
    if target.multiplies_from_registers:
        table = FROM_REGISTERS
    else:
        table = ON_HOPPER[operation] if (target.compute_capability or 0) < 100 else ON_BLACKWELL
    fits_in = lambda config: shared_memory(operation, operands, config) <= shared_memory_limit(target)
    found, small = ([config for config in map(_config, of_table) if fits_in(config)] for of_table in (table, SMALL))
    return found or small[:1] or [_config(SMALL[-1])]


def _config(values: tuple[int, ...]) -> RecurrenceConfig:
    chunk, warps, stages, columns = (*values, 64)[:4]
    return RecurrenceConfig(
        chunk_size=chunk,
        block_v=columns,
        num_warps=warps,
        num_stages=stages,
        algorithm="chunks",
        platform=Platform.TRITON,
        backend=Backend.GPU,
    )


def shared_memory(operation: str, operands: Operands, config: RecurrenceConfig) -> int:
    """Bytes of shared memory that a config takes."""
    if not has_own_kernels(operation, operands):
        return configs.shared_memory(_of_recurrence(operation), shapes_of(operands), config)
    chunk, d, v = config.chunk_size, configs.padded(operands.B.shape[3]), configs.padded(operands.x.shape[3])
    columns = min(config.block_v, v)
    # Tiles of bfloat16. `keys` are those of q and k beyond the first tile. One block of columns is loaded at a time,
    # but two if these are all.
    features, at_once = min(FEATURES, d), v if v == 2 * columns else columns
    keys = chunk * ROWS if d > ROWS else 0
    if operation == "state_space_v2":
        # x and three parts of y; then columns, states and q of every stage, and a tile of y.
        of_states = 2 * chunk * (features + 3 * columns)
        of_stage = chunk * at_once + d * at_once + keys * (at_once // columns) + 4 * chunk
        of_outputs = 2 * config.num_stages * of_stage
        return max(of_states, of_outputs + 2 * chunk * (min(d, ROWS) + at_once)) + 1024
    # Of a pass: two stages of two tiles of features and two of columns, and a state in parts. Of `groups_kernel`: two
    # of columns and two of states. Of `heads_kernel`: two of columns, dh', k, and pairs.
    of_pass = 2 * 2 * chunk * (2 * features + 2 * columns + 2) + 2 * 2 * features * columns
    of_groups = 2 * config.num_stages * (2 * chunk * columns + 2 * features * columns + 4 * chunk)
    of_heads = 2 * config.num_stages * (2 * chunk * at_once + d * at_once + keys + 4 * chunk) + 12 * chunk**2 + 1024
    return max(of_pass, of_groups, of_heads)


def has_own_kernels(operation: str, operands: Operands) -> bool:
    """Whether kernels of state spaces compute the call, if it is not one token after the other."""
    if operation == "state_space_v2_jvp" or dtype_of_products(operands) != np.dtype("bfloat16"):
        return False
    return operation != "state_space_v2" or operands.x.shape[1] > LONGEST or operands.spans is not None


def _of_recurrence(operation: str) -> str:
    return operation.replace("state_space_v2", "recurrence")
