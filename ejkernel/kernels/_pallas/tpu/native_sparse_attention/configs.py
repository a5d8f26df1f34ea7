"""The configs of the kernels of native_sparse_attention.

block_q is the rows of a tile: block_q / group neighbouring queries, at most 32, with the heads of their group. block_k
is the keys whose logits are computed at once, those of one or more whole blocks. Larger tiles have a larger union of
blocks, of which each query sees a smaller part, but read each block less often.
"""

import math

from ejkernel.kernels._native_sparse import slots_of
from ejkernel.kernels._pallas.tpu import SMEM_BYTES, SUBLANES
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target

LANES = 128
# Each query of a tile has one bit of a word.
MOST_QUERIES = 32
SIZES = ((256, 512), (128, 512), (128, 256), (256, 256), (512, 512))
WORTH_TIMING = 3
# The most blocks of a record: their four numbers each fill two rows of scalar memory, and vector memory holds the
# blocks of two records.
MOST_ENTRIES = 64
BUFFER_BYTES = 20 * 2**20
# The vector memory for tiles, sums and logits.
TILE_BYTES = 24 * 2**20


def space(operation: str, operands: Operands, spec: NativeSparseAttentionSpec, target: Target) -> list[KernelConfig]:
    """The configs worth measuring for a call (arrays or shapes), the most promising first."""
    del target
    return fitting(operation, operands, spec)[:WORTH_TIMING]


def fitting(operation: str, operands: Operands, spec: NativeSparseAttentionSpec) -> list[KernelConfig]:
    """The configs that fit into the memories of a core, the most promising first."""
    size, found = padded_size(operands, spec), []
    for rows, keys in SIZES:
        rows = queries_of(rows, operands) * padded_group(operands)
        config = KernelConfig(rows, size * max(1, keys // size), platform=Platform.PALLAS, backend=Backend.TPU)
        if config not in found and _fits(operation, operands, spec, config):
            found.append(config)
    return found


def padded_group(operands: Operands) -> int:
    """The rows of one query: the heads of a group, padded to a power of two with which 32 queries fill the lanes."""
    return max(LANES // MOST_QUERIES, 1 << (operands.q.shape[2] // operands.k.shape[2] - 1).bit_length())


def queries_of(rows: int, operands: Operands) -> int:
    """The queries of a tile of `rows` rows."""
    return max(1, min(MOST_QUERIES, rows // padded_group(operands)))


def padded_size(operands: Operands, spec: NativeSparseAttentionSpec) -> int:
    """The keys of a block, padded to whole registers."""
    whole = SUBLANES * 4 // operands.k.dtype.itemsize
    return -(-spec.block_size // whole) * whole


def entries_of(bytes_of_entry: int, entries: int, at_once: int) -> int:
    """The entries of a record, a multiple of `at_once`, for lists of up to `entries` entries."""
    most = min(MOST_ENTRIES, BUFFER_BYTES // (2 * bytes_of_entry), -(-entries // at_once) * at_once)
    return max(1, most // at_once) * at_once


def bytes_of(rows: int, *features: int, itemsize: int) -> int:
    """Bytes in vector memory of arrays with `rows` rows and these features."""
    return sum(rows * -(-n // LANES) * LANES * itemsize for n in features)


def at_once(config: KernelConfig, size: int) -> int:
    """The blocks of `size` keys (tiles of `size` rows in the gradient of keys) that are computed at once."""
    return max(1, min(MOST_ENTRIES, config.block_k // size))


def _fits(operation: str, x: Operands, spec: NativeSparseAttentionSpec, config: KernelConfig) -> bool:
    (b, s, _, d), (_, _, g, e), size = x.q.shape, x.v.shape, x.q.dtype.itemsize
    queries = queries_of(config.block_q, x)
    tiles, union = b * g * -(-s // queries), queries * x.block_indices.shape[3]
    keys, rows = padded_size(x, spec), config.block_q
    moving = 2 if operation.endswith("_jvp") else 1
    of_block = moving * bytes_of(keys, d, e, itemsize=size)
    lists = [(tiles, of_block, entries_of(of_block, union, at_once(config, keys)))]
    if operation.endswith("_bwd"):
        of_tile = bytes_of(rows, d, e, itemsize=size) + bytes_of(SUBLANES, rows, itemsize=4)
        slots = b * g * slots_of(x, spec.block_size)
        lists.append((slots, of_tile, entries_of(of_tile, tiles // (b * g), at_once(config, rows))))
    pairs = tiles * min(union, slots_of(x, spec.block_size))
    for majors, of_entry, entries in lists:
        if 2 * entries * of_entry > BUFFER_BYTES or 4 * (majors + pairs // entries) > SMEM_BYTES:
            return False
    logits = 6 * 4 * math.prod((config.block_k, rows))
    sums = 2 * 4 * moving * max(bytes_of(d, rows, itemsize=1), bytes_of(e, rows, itemsize=1))
    return logits + sums + 3 * moving * bytes_of(rows, d, e, itemsize=size) <= TILE_BYTES
