"""The configs of native_sparse_attention on Hopper: 64 rows of queries for each consumer warpgroup, and the stages."""

from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target

from ..flash_attention.configs import SHARED_BYTES

ROWS, BLOCK_K = 64, 64
# Rows of a thread block, the likeliest first: three consumer warpgroups, or two.
BLOCKS_Q = (192, 128)
MOST_STAGES, LEAST_STAGES = 5, 2
# Of shared memory, for barriers.
BARRIER_BYTES = 2048


def space(name: str, operands: Operands, spec: NativeSparseAttentionSpec, target: Target) -> list[KernelConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first."""
    del name, spec, target
    return [
        KernelConfig(
            block_q, BLOCK_K, num_warps=4 * (block_q // ROWS + 1), num_stages=stages_of(operands, block_q),
            platform=Platform.PALLAS, backend=Backend.GPU,
        )
        for block_q in BLOCKS_Q
    ]  # fmt: skip


def stages_of(operands: Operands, block_q: int) -> int:
    """How many blocks of keys and values fit beside the queries."""
    features, value_features, size = operands.q.shape[3], operands.v.shape[3], operands.q.dtype.itemsize
    left = SHARED_BYTES - BARRIER_BYTES - block_q * features * size
    return min(MOST_STAGES, left // (BLOCK_K * (features + value_features) * size))


def refuses(operation: str, config: KernelConfig) -> str | None:
    """What the kernel has against a config, or None."""
    del operation
    if config.block_q not in BLOCKS_Q:
        return f"config.block_q is {config.block_q}; the kernel takes {' and '.join(map(str, BLOCKS_Q))}"
    if config.block_k != BLOCK_K:
        return f"config.block_k is {config.block_k}; the kernel takes {BLOCK_K}"
    if not LEAST_STAGES <= config.num_stages <= MOST_STAGES:
        return f"config.num_stages is {config.num_stages}; the kernel takes {LEAST_STAGES} to {MOST_STAGES}"
    return None


def excess(operands: Operands, config: KernelConfig) -> str | None:
    """What the kernel has against a config for given operands, or None."""
    if config.num_stages > (most := stages_of(operands, config.block_q)):
        return f"config.num_stages is {config.num_stages}; {most} fit into shared memory"
    return None
