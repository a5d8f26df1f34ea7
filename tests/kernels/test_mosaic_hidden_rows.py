"""Which rows, blocks and tiles the Hopper kernels overwrite with zeros, by the definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention.hidden_rows import hidden_rows
from ejkernel.kernels._pallas.gpu.flash_attention.mask_info import fully_masked, mask_info_of, with_hidden_columns
from ejkernel.kernels._visibility import visibility_of
from tests.gpu.attention_cases import CASES
from tests.gpu.oracle import visible

PACKED = [case for case in CASES if case.packed and not case.spec.dropout_rate]
BLOCK_ROWS, BLOCK_COLUMNS = 32, 16


@pytest.mark.parametrize("rows, block", [(64, 16), (65, 16), (7, 128)])
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_rows_and_blocks(rows, block, share):
    masked = np.random.default_rng(rows).random((2, 1, rows)) < share
    found = hidden_rows(jnp.asarray(masked), block)
    assert found.rows.shape == (2, -(-rows // block) * block) and found.tiles is None
    np.testing.assert_array_equal(found.rows[:, :rows], masked[:, 0])
    assert not found.rows[:, rows:].any()
    np.testing.assert_array_equal(found.blocks, found.rows.reshape(2, -1, block).any(2))


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
def test_a_tile_knows_whether_it_streams_a_hidden_column(case, of_keys):
    x, spec = case.make(150, jnp.float32)
    visibility, ok = visibility_of(x, spec), np.asarray(visible(x, spec))[:, 0]
    visibility, ok = (visibility.transposed(), ok.swapaxes(1, 2)) if of_keys else (visibility, ok)
    mask_info = mask_info_of(visibility, BLOCK_ROWS, BLOCK_COLUMNS)
    hidden = with_hidden_columns(mask_info, fully_masked(visibility.transposed()), BLOCK_COLUMNS).hidden_columns
    np.testing.assert_array_equal(*np.broadcast_arrays(hidden.rows[:, : ok.shape[2]], ~ok.any(1)))
    ranges = np.asarray(mask_info.block_ranges)[:, 0]
    for batch, tile in np.ndindex(*hidden.tiles.shape):
        begin, end = ranges[batch, tile, :2]
        assert hidden.tiles[batch, tile] == hidden.blocks[batch, begin:end].any()
