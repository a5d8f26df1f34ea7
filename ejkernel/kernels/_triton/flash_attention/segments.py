"""Which blocks of keys a block of queries has a segment in common with, and the other way round."""

import jax.numpy as jnp
import numpy as np

from ejkernel.primitives.flash_attention import Operands

NONE = np.iinfo(np.int32).max  # above every segment id


def spans(operands: Operands, held: int, step: int, of_keys: bool = False):
    """[B, blocks, 2] int32: for each block of `held` queries the first key and the end of those it has to look at.

    These are whole blocks of `step` keys: from the first to the last whose segment ids reach into the range of the
    queries' own. Where ids are sorted, blocks that share no segment with the queries are so left out; where they are
    not, some of these may lie between. None without segments; `of_keys` exchanges queries and keys.
    """
    ids = operands.q_segment_ids, operands.kv_segment_ids
    if ids[0] is None:
        return None
    (low, high), (other_low, other_high) = map(_range, ids[::-1] if of_keys else ids, (held, step))
    shared = (low[:, :, None] <= other_high[:, None, :]) & (other_low[:, None, :] <= high[:, :, None])
    number = jnp.arange(shared.shape[2], dtype=jnp.int32)
    first = jnp.where(shared, number, shared.shape[2]).min(2)
    last = jnp.where(shared, number, -1).max(2)
    return jnp.stack([first, last + 1], -1) * step


def _range(ids, block: int):
    """The least and the greatest id in each block [B, blocks]; negative ids are padding, which is in no segment."""
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), constant_values=-1)
    ids = ids.reshape(ids.shape[0], -1, block)
    return jnp.where(ids < 0, NONE, ids).min(2), ids.max(2)
