"""Which tiles of the logits a kernel visits, and in which order.

Causality, windows, packed sequences and a padded end all let a query see an *interval* of keys, and segment ids narrow
it further. A tile that no query sees is not in the schedule, so it costs neither a step nor a fetch; a tile in which
every query sees every key is marked, so that it is computed without a mask. The schedule is a table of int32 that the
index maps read from scalar memory: a constant where nothing is traced; otherwise it is computed from segment ids and
cu_seqlens, and the number of steps is traced too.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ejkernel.primitives.flash_attention import Operands

from .problem import Problem, intervals, pad_axis, padded_segments

# Skipped tiles only fill the rows of batch elements that have fewer tiles than others.
SKIPPED, PARTIAL, WHOLE = 0, 1, 2


class Schedule(NamedTuple):
    """A table [b?,n] of tiles (major block · minor block · kind), how many of the n to walk, the kinds among them."""

    table: Any
    steps: Any
    kinds: tuple[int, ...]

    def visits(self, batch: int) -> int:
        """Tiles that all batch elements visit; where that is traced, at most."""
        if not isinstance(self.table, np.ndarray):
            return batch * self.table.shape[1]
        return int((self.table & 3 != SKIPPED).sum()) * (batch // self.table.shape[0])


class Step(NamedTuple):
    """One entry of the table; it opens or closes the run of tiles that have its major block."""

    major: Any
    minor: Any
    kind: Any
    opens: Any
    closes: Any


def blocks_at(table, b, step) -> tuple[Any, Any]:
    """(major, minor) block of a step."""
    entry = _entry(table, b, step)
    return entry >> 16, (entry >> 2) & 0x3FFF


def step_at(table, b, step) -> Step:
    steps = table.shape[1]
    major, minor = blocks_at(table, b, step)
    before, _ = blocks_at(table, b, jnp.maximum(step - 1, 0))
    after, _ = blocks_at(table, b, jnp.minimum(step + 1, steps - 1))
    end = pl.num_programs(2) - 1
    opens, closes = (step == 0) | (before != major), (step == end) | (after != major)
    return Step(major, minor, _entry(table, b, step) & 3, opens, closes)


def _entry(table, b, step):
    return table[b if table.shape[0] > 1 else 0, step]


def walk(touched, whole, by: str, every: bool = False) -> Schedule:
    """The tiles touched, [b?, q_blocks, k_blocks], sorted by "queries" or "keys", each of their blocks at least once.

    With `every` the others are listed too, to be skipped: for a kernel whose output has a block for every tile.
    """
    xp = np if isinstance(touched, np.ndarray) else jnp
    if by == "keys":
        touched, whole = touched.swapaxes(1, 2), whole.swapaxes(1, 2)
    batch, _, minors = touched.shape
    kind = xp.where(touched, xp.where(whole, WHOLE, PARTIAL), SKIPPED).reshape(batch, -1)
    lonely = ~touched.any(2, keepdims=True) & (xp.arange(minors) == 0)
    touched = (touched | lonely | every).reshape(batch, -1)
    count = touched.sum(1)
    tiles = touched.shape[1] if xp is jnp else int(count.max())

    order = xp.argsort(~touched, axis=1, stable=True)
    position = xp.arange(tiles)
    chosen = xp.take_along_axis(order, xp.minimum(position, count[:, None] - 1), axis=1)
    kind = xp.where(position < count[:, None], xp.take_along_axis(kind, chosen, axis=1), SKIPPED)
    table = (chosen // minors << 16) | (chosen % minors << 2) | kind
    kinds = tuple(np.unique(kind).tolist()) if xp is np else (SKIPPED, PARTIAL, WHOLE)
    return Schedule(table.astype(xp.int32), tiles if xp is np else count.max(), kinds)


def visibility(operands: Operands, problem: Problem) -> tuple[Any, Any]:
    """Which tiles somebody sees something of, and of which everybody sees everything: bool [b?, q_blocks, k_blocks]."""
    first, last = intervals(np, operands, problem)
    start = np.arange(problem.k_blocks) * problem.block_k
    end = start + problem.block_k - 1
    touched = whole = np.ones((1, problem.q_blocks, problem.k_blocks), bool)
    if first is not None:
        low, high = _extremes(first, problem.block_q)
        touched, whole = touched & (low <= end), whole & (high <= start)
    if last is not None:
        low, high = _extremes(last, problem.block_q)
        touched, whole = touched & (high >= start), whole & (low >= end)
    if operands.q_segment_ids is not None:
        q_low, q_high = _extremes(padded_segments(operands.q_segment_ids, -1, problem.block_q), problem.block_q)
        k_low, k_high = _extremes(padded_segments(operands.kv_segment_ids, -2, problem.block_k), problem.block_k)
        k_low, k_high = k_low.swapaxes(1, 2), k_high.swapaxes(1, 2)
        touched = touched & (q_low <= k_high) & (k_low <= q_high)
        whole = whole & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    if operands.mask is not None:
        touched, whole = touched & _any_in_tiles(operands.mask, problem), np.zeros_like(whole, bool)
    return touched, whole


def _extremes(x, block: int) -> tuple[Any, Any]:
    """[b?,s] → the least and the greatest of each block, [b?, blocks, 1]."""
    whole = -(-x.shape[1] // block) * block
    x = pad_axis(x, 1, whole, mode="edge").reshape(x.shape[0], -1, block)
    return x.min(2)[:, :, None], x.max(2)[:, :, None]


def _any_in_tiles(mask, problem: Problem):
    """[b?,h?,s?,t?] → whether a tile has anything in any head, [b?, q_blocks?, k_blocks?]."""
    some = mask.any(1)
    for axis, block, padded in (
        (1, problem.block_q, problem.padded_queries),
        (2, problem.block_k, problem.padded_keys),
    ):
        if some.shape[axis] > 1:
            some = pad_axis(some, axis, padded)
            some = some.reshape(*some.shape[:axis], -1, block, *some.shape[axis + 1 :]).any(axis + 1)
    return some
