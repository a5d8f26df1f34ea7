"""Which configs the kernels of native_sparse_attention are run with.

block_q is the rows of a tile, block_q / group neighbouring queries with the heads of their group; block_k the keys of a
block that a step takes; block_d the rows of gathered queries that a step of the gradient of keys takes.
"""

from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target

MOST_QUERIES = 16
# (rows of a tile, keys, rows of a step of the gradient of keys, warps, stages), the likeliest first. None was measured.
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
WIDE = tuple(config for config in HALF if config[1] <= 32)
SINGLE = ((16, 16, 16, 8, 1), (16, 16, 16, 4, 1))


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
    for rows, keys, step, warps, stages in _candidates(operation, operands):
        rows, step = (max(16, queries_of(n, heads) * padded_group(heads)) for n in (rows, step))
        step = step if operation.endswith("_bwd") else 16
        config = KernelConfig(
            rows, min(block, keys), step, warps, stages, platform=Platform.TRITON, backend=Backend.GPU
        )
        if config not in found:
            found.append(config)
    fitting = [config for config in found if shared_memory(operation, operands, config) <= limit]
    return fitting or [min(found, key=lambda config: shared_memory(operation, operands, config))]


def _candidates(operation: str, operands: Operands) -> tuple[tuple[int, ...], ...]:
    """Products of float32 are made of multiply-adds, whose operands are in registers: their tiles are small."""
    if operands.q.dtype.itemsize == 4:
        return SINGLE
    features = max(operands.q.shape[3], operands.v.shape[3])
    return WIDE if features > 128 and operation != "native_sparse_attention" else HALF


def _heads(operands: Operands) -> int:
    return operands.q.shape[2] // operands.k.shape[2]


def shared_memory(operation: str, operands: Operands, config: KernelConfig) -> int:
    """Bytes at the most: the tiles of queries and of keys that stand beside each other, and those under way.

    Weights and their gradients stand there too, on Blackwell in both layouts of their products.
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
    """That of the smallest config there is."""
    rows = max(16, padded_group(_heads(operands)))
    return shared_memory(operation, operands, KernelConfig(rows, 16, rows, 4, 1))
