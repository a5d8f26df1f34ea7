"""The chunks of a tile that TPU kernels of flash_attention compute: every visible key, with a mask where needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.tpu.flash_attention.problem import plan
from ejkernel.kernels._pallas.tpu.flash_attention.schedule import FULLY_MASKED, mask_info_of, schedule_of
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import KernelConfig

SPECS = [
    FlashAttentionSpec(),
    FlashAttentionSpec(causal=True),
    FlashAttentionSpec(causal=True, window=(127, None)),
    FlashAttentionSpec(window=(300, 140)),
    FlashAttentionSpec(window=(None, -200)),
]


def visible(queries: int, keys: int, spec: FlashAttentionSpec) -> np.ndarray:
    """[queries, keys] bool, from the definition."""
    left, right = spec.window
    position, key = np.arange(queries)[:, None] + keys - queries, np.arange(keys)
    allowed = (key <= position) | (not spec.causal)
    return allowed & (left is None or key >= position - left) & (right is None or key <= position + right)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("lengths", [(1024, 1024), (700, 1300), (1300, 700)])
@pytest.mark.parametrize("blocks", [(128, 512), (256, 1024), (512, 256)])
def test_tile_masks(spec, lengths, blocks):
    array = lambda length: jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
    x = Operands(array(lengths[0]), array(lengths[1]), array(lengths[1]))
    problem = plan(x, spec, KernelConfig(block_q=blocks[0], block_k=blocks[1]), chunk=128)
    info, dense = mask_info_of(x, problem), np.zeros((problem.padded_queries, problem.padded_keys), bool)
    dense[: lengths[0], : lengths[1]] = visible(*lengths, spec)
    for i, j in np.ndindex(problem.q_blocks, problem.k_blocks):
        mask = info.tile_masks[info.block_mask[0, i, j]]
        rows = slice(i * problem.block_q, min((i + 1) * problem.block_q, lengths[0]))
        tile = dense[rows, j * problem.block_k : (j + 1) * problem.block_k]
        computed = slice(mask.first * problem.chunk, mask.last * problem.chunk)
        assert tile[:, computed].sum() == tile.sum()
        assert mask.needs_mask or tile[:, computed].all()
        assert (mask == FULLY_MASKED) == (not tile.any())


def test_fully_masked_chunks_are_left_out():
    """With a window of 128 keys, 512 queries see 5 chunks of 128, at the beginning 4, for any tile."""
    q = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.bfloat16)
    x, spec = Operands(q, q, q), FlashAttentionSpec(causal=True, window=(127, 0))
    problem = plan(x, spec, KernelConfig(block_q=512, block_k=2048), chunk=128)
    schedule = schedule_of(mask_info_of(x, problem), by="queries")
    masks = [schedule.tile_masks[entry & 15] for entry in schedule.table[0]]
    assert sum(mask.last - mask.first for mask in masks) == 7 * 5 + 4
