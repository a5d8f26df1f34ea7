"""The configs of the kernels of the gated delta rule: the heuristic choice, and the space that tuning searches.

chunk_size is the tokens of a chunk; block_v the columns of a state that a program keeps, num_warps and num_stages those
of the programs that go from chunk to chunk, or in the algorithm "steps" from token to token.
"""

import numpy as np

from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.kernels._triton._recurrence.problem import padded
from ejkernel.kernels._triton._recurrence.step import LONGEST
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec, Operands
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.recurrence import RecurrenceConfig

# (chunk_size, block_v, num_warps, num_stages), the fastest on an H200 first. Two programs that are not pipelined share
# a multiprocessor; where there are too few programs for that, those of the second table are faster.
FORWARD, BACKWARD = ((64, 64, 4, 1), (64, 64, 4, 3), (64, 32, 4, 2)), ((64, 64, 4, 1), (64, 64, 4, 2), (64, 32, 4, 2))
TANGENT = ((64, 32, 4, 1), (32, 32, 4, 1))
MANY = {"gated_delta_rule": FORWARD, "gated_delta_rule_bwd": BACKWARD, "gated_delta_rule_jvp": TANGENT}
FEW = {
    "gated_delta_rule": ((64, 64, 4, 3), (64, 32, 4, 2), (64, 64, 4, 1)),
    "gated_delta_rule_bwd": ((64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 4, 1)),
    "gated_delta_rule_jvp": TANGENT,
}
# With mma.sync, whose operands are registers, 64 columns spill; wgmma and tcgen05 read them from shared memory.
BLACKWELL = (100, 103, 110)
WITHOUT_MMA_SYNC = (90, *BLACKWELL)
BACKWARD_BY_MMA_SYNC = ((64, 32, 4, 1), (64, 32, 4, 2))
WIDE = ((64, 32, 8, 1), (32, 32, 8, 1))  # for more than 128 features
# For float32, and for float16, where a product is computed as three of TF32; and where no other fits.
# 32 columns of float16 spill by mma.sync, in the tangent and with more than 64 features; those of float32 on Blackwell
# in the backward with more than 64.
SMALL = ((16, 32, 8, 1), (16, 16, 8, 1))
STEP_BLOCKS = (32, 64, 16)
NUMBERS_PER_THREAD = 128
"""Of a state, from token to token: as many as registers hold. With 16, 64 decodes took 88 µs on an H200, not 75."""


def space(operation: str, operands: Operands, spec: GatedDeltaRuleSpec, target: Target) -> list[RecurrenceConfig]:
    """The configs worth measuring for a call (arrays or shapes), the most promising first."""
    if operation == "gated_delta_rule" and operands.q.shape[1] <= LONGEST and operands.spans is None:
        features = operands.q.shape[3]
        return [_config(64, block, warps_of_step(features, block), 1, "steps") for block in STEP_BLOCKS]
    limit = shared_memory_limit(target)
    fit = lambda listed: [c for c in (_config(*v) for v in listed) if shared_memory(operation, operands, c) <= limit]
    if operands.q.dtype != np.dtype("bfloat16"):
        is_wide, is_half = padded(operands.q.shape[3]) > 64, operands.q.dtype == np.dtype("float16")
        if is_half:
            spills = has_mma_sync(target) and (is_wide or operation == "gated_delta_rule_jvp")
        else:
            spills = target.compute_capability in BLACKWELL and is_wide and operation == "gated_delta_rule_bwd"
        return fit(SMALL[1:] if spills else SMALL)
    batch, _, heads, features = operands.v.shape
    programs = batch * heads * -(-features // 64)
    are_many = programs > (target.core_count or 0)
    listed = (MANY if are_many else FEW)[operation]
    if padded(operands.q.shape[3]) > 128:
        listed = WIDE if target.compute_capability == 90 else WIDE[1:]
    elif operation == "gated_delta_rule_bwd" and has_mma_sync(target):
        listed = BACKWARD_BY_MMA_SYNC if are_many else BACKWARD_BY_MMA_SYNC[::-1]
    elif operation == "gated_delta_rule_jvp" and target.compute_capability != 90:
        listed = SMALL  # with more, registers spill where they hold the operands of products
    return fit(listed) or fit(SMALL)


def has_mma_sync(target: Target) -> bool:
    """Whether products are by mma.sync there."""
    return target.platform == "cuda" and target.compute_capability not in WITHOUT_MMA_SYNC


def warps_of_step(features: int, columns: int) -> int:
    """The warps of a program that goes from token to token."""
    return max(1, padded(features) * columns // (32 * NUMBERS_PER_THREAD))


def least_memory(operation: str, operands: Operands) -> int:
    """Bytes of shared memory of the smallest config."""
    return shared_memory(operation, operands, _config(*SMALL[-1]))


def shared_memory(operation: str, operands: Operands, config: RecurrenceConfig) -> int:
    """Bytes of shared memory of the largest kernel.

    That of a chunk has q and k, and two tiles of pairs of rows in float32; one that goes from chunk to chunk, without
    stages, two tiles of rows and the state, and with them three tiles, one of columns, and one of pairs for each stage.
    """
    c, d, e = config.chunk_size, padded(operands.q.shape[3]), min(config.block_v, padded(operands.v.shape[3]))
    if config.algorithm == "steps":
        return 4 * (d + e) * config.num_warps
    size = 2 if operands.q.dtype == np.dtype("bfloat16") else 4
    staged = 2 * c * d if config.num_stages == 1 else (3 * c * d + c * e + c * c) * config.num_stages
    if operation == "gated_delta_rule_jvp":
        return (5 * c * d + max(2 * d * e, c * c)) * size
    return max(2 * c * d * size + 8 * c * c, (staged + d * e) * size)


def _config(chunk_size, block_v, num_warps, num_stages, algorithm=None) -> RecurrenceConfig:
    return RecurrenceConfig(
        chunk_size=chunk_size,
        block_v=block_v,
        num_warps=num_warps,
        num_stages=num_stages,
        platform=Platform.TRITON,
        backend=Backend.GPU,
        algorithm=algorithm,
    )
