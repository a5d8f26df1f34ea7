"""Which configs the kernels of native_sparse_attention are run with.

block_q is the rows of a tile, block_q / group neighbouring queries with the heads of their group; block_k is that of the
blocks of keys, and block_d the rows of the queries that a step of the gradient of keys takes.
"""

from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target

MOST_QUERIES = 16
# (rows of a tile, rows of a step of the gradient of keys, warps, stages), the likeliest first. None was measured.
CANDIDATES = (
    (64, 64, 4, 2),
    (32, 64, 4, 2),
    (16, 32, 4, 2),
    (16, 32, 2, 2),
    (64, 64, 4, 1),
    (128, 128, 8, 2),
    (32, 32, 2, 1),
    (16, 16, 4, 1),
)


def power_of_two(n: int) -> int:
    """The least power of two that is not less than n, and 16 at least."""
    return max(16, 1 << (n - 1).bit_length())


def padded_group(heads: int) -> int:
    """The rows of one query: the least power of two that holds the heads of a group."""
    return 1 << (heads - 1).bit_length()


def queries_of(rows: int, heads: int) -> int:
    """The queries of a tile of so many rows, of which each has the heads of a group; 16 at most."""
    return max(1, min(MOST_QUERIES, rows // padded_group(heads)))


def space(operation: str, operands: Operands, spec: NativeSparseAttentionSpec, target: Target) -> list[KernelConfig]:
    """Those of the candidates that fit into the shared memory of the target; the smallest where none does."""
    limit, heads, block = shared_memory_limit(target), _heads(operands), power_of_two(spec.block_size)
    found = []
    for rows, step, warps, stages in CANDIDATES:
        rows, step = (max(16, n, padded_group(heads)) for n in (rows, step))
        rows, step = (max(16, queries_of(n, heads) * padded_group(heads)) for n in (rows, step))
        if not operation.endswith("_bwd"):
            step = 16
        config = KernelConfig(rows, block, step, warps, stages, platform=Platform.TRITON, backend=Backend.GPU)
        if config not in found:
            found.append(config)
    fitting = [config for config in found if shared_memory(operation, operands, config) <= limit]
    return fitting or [min(found, key=lambda config: shared_memory(operation, operands, config))]


def _heads(operands: Operands) -> int:
    return operands.q.shape[2] // operands.k.shape[2]


def shared_memory(operation: str, operands: Operands, config: KernelConfig) -> int:
    """Bytes at the most: the tiles of queries and of keys that stand beside each other, and those under way."""
    (*_, d), (*_, e), size = operands.q.shape, operands.v.shape, operands.q.dtype.itemsize
    d, e = power_of_two(d), power_of_two(e)
    moving, stages = config.block_k * (d + e), max(1, config.num_stages)
    if operation.endswith("_jvp"):
        return size * (config.block_q * (2 * d + config.block_k) + 2 * stages * moving)
    forward = config.block_q * (d + config.block_k) + stages * moving
    if not operation.endswith("_bwd"):
        return size * forward
    rows = config.block_q * (d + e + config.block_k) + stages * moving
    keys = moving + stages * config.block_d * (d + e) + 2 * config.block_d * config.block_k
    return size * max(rows, keys)


def least_memory(operation: str, operands: Operands, spec: NativeSparseAttentionSpec) -> int:
    """That of the smallest config there is."""
    rows = max(16, padded_group(_heads(operands)))
    config = KernelConfig(rows, power_of_two(spec.block_size), rows, 4, 1)
    return shared_memory(operation, operands, config)
