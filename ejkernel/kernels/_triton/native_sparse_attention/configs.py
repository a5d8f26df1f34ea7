"""The configs of the kernels of native_sparse_attention.

block_q is the rows of a tile: block_q / group neighbouring queries with the heads of their group. block_k is the keys
of a block that are computed per step, block_d the rows of gathered queries per step of the gradient of keys.
"""

from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target

MOST_QUERIES = 16
# (block_q, block_k, block_d, num_warps, num_stages); up to 128 features the fastest of an operation on an H200 comes
# first.
HALF = (
    (64, 64, 64, 4, 2),
    (32, 64, 64, 4, 2),
    (16, 64, 32, 4, 2),
    (16, 64, 32, 4, 1),
    (64, 64, 64, 4, 1),
    (128, 64, 128, 8, 2),
    (64, 32, 64, 4, 3),
    (32, 32, 32, 4, 2),
    (16, 32, 16, 4, 1),
    (16, 16, 16, 4, 1),
)
FASTEST = {
    "native_sparse_attention": (64, 32, 64, 4, 3),
    "native_sparse_attention_bwd": (64, 64, 64, 4, 2),
    "native_sparse_attention_jvp": (16, 64, 32, 4, 2),
}
WIDE = tuple(config for config in HALF if config[1] <= 32)
SINGLE = ((16, 16, 16, 8, 1), (16, 16, 16, 4, 1))


def power_of_two(n: int) -> int:
    """The least power of two ≥ n, at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def padded_group(heads: int) -> int:
    """The rows of one query in a tile: the heads of a group, padded to a power of two."""
    return 1 << (heads - 1).bit_length()


def queries_of(rows: int, heads: int) -> int:
    """The queries of a tile of `rows` rows, at most 16; each query takes one row per head of the group, padded."""
    return max(1, min(MOST_QUERIES, rows // padded_group(heads)))


def space(operation: str, operands: Operands, spec: NativeSparseAttentionSpec, target: Target) -> list[KernelConfig]:
    """The candidates that fit into the shared memory of the target; the smallest one if none does."""
    limit, heads, block = shared_memory_limit(target), _heads(operands), power_of_two(spec.block_size)
    found = []
    for rows, keys, step, warps, stages in _candidates(operation, operands):
        rows, step = (max(16, queries_of(n, heads) * padded_group(heads)) for n in (rows, step))
        step = step if operation.endswith("_bwd") else 16
        warps = max(warps, rows // 16)  # registers spill if a warp has more than 16 rows
        config = KernelConfig(
            rows, min(block, keys), step, warps, stages, platform=Platform.TRITON, backend=Backend.GPU
        )
        if config not in found:
            found.append(config)
    fitting = [config for config in found if shared_memory(operation, operands, config) <= limit]
    return fitting or [min(found, key=lambda config: shared_memory(operation, operands, config))]


def _candidates(operation: str, operands: Operands) -> tuple[tuple[int, ...], ...]:
    """The candidates for a dtype: float32 has small tiles, as its products are multiply-adds of registers."""
    if operands.q.dtype.itemsize == 4:
        return SINGLE
    features = max(operands.q.shape[3], operands.v.shape[3])
    if features > 128:
        return HALF if operation == "native_sparse_attention" else WIDE
    return FASTEST[operation], *HALF


def _heads(operands: Operands) -> int:
    return operands.q.shape[2] // operands.k.shape[2]


def shared_memory(operation: str, operands: Operands, config: KernelConfig) -> int:
    """An upper bound of the bytes of shared memory: tiles of queries and keys, and those in the stages of the pipeline.

    Weights and their gradients need shared memory too, on Blackwell in both layouts of their products.
    """
    (*_, d), (*_, e), size = operands.q.shape, operands.v.shape, operands.q.dtype.itemsize
    d, e = power_of_two(d), power_of_two(e)
    moving, stages = config.block_k * (d + e), max(1, config.num_stages)
    if operation.endswith("_jvp"):
        tiles = config.block_q * (2 * d + 2 * config.block_k) + 2 * stages * moving
    elif operation.endswith("_bwd"):
        of_queries = config.block_q * (d + e + config.block_k) + stages * moving
        of_keys = moving + config.block_d * (stages * (d + e) + 5 * config.block_k)
        tiles = max(of_queries, of_keys)
    else:
        tiles = config.block_q * (d + config.block_k) + stages * moving
    return size * tiles + 1024


def least_memory(operation: str, operands: Operands) -> int:
    """Bytes of shared memory of the smallest config."""
    rows = max(16, padded_group(_heads(operands)))
    return shared_memory(operation, operands, KernelConfig(rows, 16, rows, 4, 1))
