"""Which queries see no key of their segment, and which keys no query sees: a kernel of its own.

Ids need not be sorted, so that all pairs would have to be looked at. But nearly every row sees a column beside the
diagonal, where the band ends: a warp looks there first, goes on from block to block, and stops when a column is visible
to each of its rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._visibility import Visibility

from .._launch import (
    PER_COLUMN,
    PER_ROW,
    ROWS,
    broadcast_columns,
    broadcast_rows,
    full,
    indices,
    launch,
    load_vector,
    warp_any,
)

BLOCK = 64


def fully_masked(visibility: Visibility) -> Array:
    """Whether a query sees no key, bool [b,1,q_len], of a visibility with segment ids and no mask."""
    rows, columns = (_whole_blocks(x) for x in visibility.segment_ids)
    batch, count = rows.shape
    everywhere = visibility.q_len + visibility.kv_len
    low, high = visibility.low, visibility.high
    start = high if high is not None else low or 0
    band = -everywhere if low is None else low, everywhere if high is None else high, start
    visible = launch(
        partial(_kernel, length=visibility.kv_len),
        "flash_attention_fully_masked",
        (rows, columns, jnp.array(band, jnp.int32)),
        out_type=jax.ShapeDtypeStruct((batch, count), jnp.int32),
        blocks=batch * count // ROWS,
        warpgroups=1,
        scratch=dict(visible_tile=plgpu.SMEM((ROWS,), jnp.int32)),
    )
    return (visible == 0)[:, None, : visibility.q_len]


def _kernel(rows, columns, band, visible, *, length: int, visible_tile):
    tiles = np.int32(rows.shape[1] // ROWS)
    batch, first = lax.div(lax.axis_index("block"), tiles), lax.rem(lax.axis_index("block"), tiles) * ROWS
    low, high, last = band[0], band[1], np.int32(length - 1)
    begin = lax.div(jnp.clip(first + low, 0, last), np.int32(BLOCK))
    end = lax.div(jnp.clip(first + ROWS - 1 + high, 0, last), np.int32(BLOCK)) + 1
    start = jnp.clip(lax.div(jnp.clip(first + band[2], 0, last), np.int32(BLOCK)), begin, end - 1) - begin
    ids = load_vector(rows.at[batch, pl.ds(first, ROWS)], PER_ROW, optimized=False)

    def look(state):
        n, found, _ = state
        column = (begin + lax.rem(start + n, end - begin)) * BLOCK
        of_columns = load_vector(columns.at[batch, pl.ds(column, BLOCK)], PER_COLUMN, optimized=False)
        shape = ROWS, BLOCK
        like = indices(jnp.int32(0), 0, shape)
        ahead = indices(column - first, 1, shape) - like
        sees = (broadcast_rows(ids, like) == broadcast_columns(of_columns, like)) & (ahead >= low) & (ahead <= high)
        found = jnp.maximum(found, jnp.where(sees, 1.0, 0.0).max(axis=1))
        return n + 1, found, warp_any((found == 0) & (ids >= 0), PER_ROW)

    more = lambda state: state[2] & (state[0] < end - begin)
    found = full((ROWS,), 0.0, PER_ROW)
    _, found, _ = lax.while_loop(more, look, (jnp.int32(0), found, warp_any(ids >= 0, PER_ROW)))
    visible_tile[...] = jnp.where(ids >= 0, found, 0.0).astype(jnp.int32)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(visible_tile, visible.at[batch, pl.ds(first, ROWS)])
    plgpu.wait_smem_to_gmem(0)


def _whole_blocks(ids: Array) -> Array:
    """Ids up to the end of the last block; padding of rows and of columns is −1."""
    return jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % BLOCK)), constant_values=-1)
