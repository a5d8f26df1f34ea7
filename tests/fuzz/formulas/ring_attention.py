"""Attention of a sequence whose tokens are in the order in which they are sharded, with all the logits at once."""

import numpy as np

from .flash_attention import formula
from .flash_attention import kept as kept_in_sequence

__all__ = ["formula"]


def positions(layout, length, size):
    """Where the tokens of all devices, one device after the other, stand in the sequence."""
    if layout == "contiguous" or size == 1:
        return np.arange(length)
    if layout == "striped":
        return np.arange(length).reshape(-1, size).T.ravel()
    chunks = np.arange(length).reshape(2 * size, -1)
    return np.concatenate([chunks[[device, 2 * size - 1 - device]] for device in range(size)]).ravel()


def visible(S, K, size, options, ids=None, mask=None):
    """Whether a query sees a key: bool [B or 1, H or 1, S, K]."""
    i, j = (positions(options["layout"], length, size) for length in (S, K))
    distance = j[None] - (i + K - S)[:, None]
    window = options.get("window")
    left, right = (window - 1, 0) if isinstance(window, int) else window or (None, None)
    right = right if not options.get("causal") else 0 if right is None else min(0, right)
    ok = (True if left is None else distance >= -left) & (True if right is None else distance <= right)
    ok = np.broadcast_to(ok, (1, 1, S, K))
    if ids is not None:
        q_ids, kv_ids = (np.asarray(a, np.int64) for a in ids)
        ok = ok & ((q_ids[:, :, None] == kv_ids[:, None]) & (q_ids[:, :, None] >= 0))[:, None]
    return ok if mask is None else ok & mask


def kept(seed, shape, rate, layout, size):
    """Whether dropout keeps a weight: as in attention of the whole sequence, by the positions there."""
    whole = kept_in_sequence(seed, shape, rate)
    i, j = (positions(layout, length, size) for length in shape[2:])
    return whole[..., i, :][..., j]
