"""The configs of the kernel of native_sparse_blocks: block_q queries of a tile, with the heads of their group."""

from ejkernel.primitives.native_sparse_blocks import NativeSparseBlocksSpec, Operands
from ejkernel.types import Backend, KernelConfig, Platform

from .. import SMEM_BYTES, SUBLANES, VMEM_BYTES, round_up

LANES = 128
QUERIES = (32, 16, 8)
CHUNK = 256
"""Mean keys whose products are computed at a time."""


def space(operands: Operands, spec: NativeSparseBlocksSpec) -> list[KernelConfig]:
    """Those whose tiles fit into vector memory, and whose ranges of chunks into scalar memory."""
    return [
        KernelConfig(block_q=queries, block_k=spec.block_size, platform=Platform.PALLAS, backend=Backend.TPU)
        for queries in QUERIES
        if vector_memory(operands, spec, queries) <= VMEM_BYTES and scalars(operands, queries) <= SMEM_BYTES
    ]


def padded_heads(operands: Operands) -> int:
    """The rows of one query in a tile: the heads of a group, in whole registers."""
    return round_up(operands.q.shape[2] // operands.k.shape[2], SUBLANES)


def slots_of(operands: Operands, spec: NativeSparseBlocksSpec) -> int:
    """Mean keys, in whole chunks."""
    return round_up(operands.k.shape[1] // spec.block_size, CHUNK)


def vector_memory(operands: Operands, spec: NativeSparseBlocksSpec, queries: int) -> int:
    """Bytes of logits, scores, mean keys and queries, two of what is copied, and of a chunk's numbers in float32."""
    rows, slots, features = queries * padded_heads(operands), slots_of(operands, spec), operands.q.shape[3]
    copied = 2 * (rows + 2 * slots) * round_up(features, LANES) * operands.q.dtype.itemsize
    return 4 * (rows * slots + 4 * queries * slots + 6 * rows * CHUNK) + copied


def scalars(operands: Operands, queries: int) -> int:
    """Bytes of the ranges of chunks of all tiles."""
    return 8 * operands.q.shape[0] * -(-operands.q.shape[1] // queries)
