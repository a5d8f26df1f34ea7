"""What segment ids say of whole blocks: which see nothing of each other, and which see each other entirely.

Both are found before a kernel runs, so that its loop passes over the former and asks for no ids in the latter.
"""

import jax.numpy as jnp

from ejkernel.primitives.flash_attention import Operands


def spans(operands: Operands, held: int, step: int, of_keys: bool = False):
    """[B, blocks, 4] int32: of each block of `held` queries the range of keys that it has to look at, and within that
    a range whose every key is in the one segment of all these queries. None without segments.

    Ranges are made of whole blocks of `step` keys. The first goes from the first to the last block whose ids reach
    into the range of the queries' own: where ids are sorted, blocks that share no segment with the queries are left
    out; where they are not, some of these may lie between. `of_keys` exchanges queries and keys.
    """
    ids = operands.q_segment_ids, operands.kv_segment_ids
    if ids[0] is None:
        return None
    own, others = map(_ranges, ids[::-1] if of_keys else ids, (held, step))
    (least, low, high), (other_least, other_low, other_high) = (
        (x[:, :, None] for x in own),
        (x[:, None] for x in others),
    )
    number = jnp.arange(other_low.shape[2], dtype=jnp.int32)[None, None]
    none = jnp.int32(other_low.shape[2])
    shared = (low <= other_high) & (other_low <= high)
    whole = (least == high) & (other_least == other_high) & (high == other_high) & (high >= 0)
    begin = jnp.where(shared, number, none).min(2)
    end = jnp.where(shared, number, -1).max(2) + 1
    whole_begin = jnp.where(whole, number, none).min(2)
    whole_end = jnp.where(whole | (number < whole_begin[:, :, None]), none, number).min(2)
    return jnp.stack([begin, end, whole_begin, whole_end], -1) * step


def _ranges(ids, block: int):
    """The least id in each block [B, blocks], the least that is not padding, and the greatest. Padding is negative."""
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), constant_values=-1)
    ids = ids.reshape(ids.shape[0], -1, block)
    return ids.min(2), jnp.where(ids < 0, jnp.iinfo(ids.dtype).max, ids).min(2), ids.max(2)
