"""Which tiles of the logits a kernel visits, and in which order.

Causality, windows, packed sequences and a padded end all let a query see an *interval* of keys, and segment ids narrow
it further. A tile that no query sees is not in the schedule, so it costs neither a step nor a fetch; of the others the
schedule tells which chunks of keys somebody sees, and whether everybody sees all of these, so that they need no mask.
It is a table of int32 that the index maps read from scalar memory: a constant where nothing is traced; otherwise it is
computed from segment ids and cu_seqlens, and the number of steps is traced too.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ejkernel.kernels._visibility import visibility_of
from ejkernel.primitives.flash_attention import Operands

from .problem import Problem, pad_axis


class Kind(NamedTuple):
    """What is computed of a tile: the chunks of keys from `first` to before `last`, with a mask or without."""

    first: int
    last: int
    masked: bool


# Skipped tiles only fill the rows of batch elements that have fewer tiles than others.
SKIPPED = Kind(0, 0, False)
# A kernel has code of its own for each kind: that of so many tiles, beyond which tiles are computed as a whole.
MOST_CODE = 3
# An entry of the table: the major block, the minor one, the kind.
BLOCK_BITS, KIND_BITS = 14, 4


class Seen(NamedTuple):
    """The kinds of tiles that a call has, and of which kind each is, [b?, q_blocks, k_blocks]; 0 is SKIPPED."""

    kind: Any
    kinds: tuple[Kind, ...]


class Schedule(NamedTuple):
    """A table [b?,n] of tiles (major block · minor block · kind), how many of the n to walk, the kinds by number, and
    whether there is one tile for each major block."""

    table: Any
    steps: Any
    kinds: tuple[Kind, ...]
    single: bool

    @property
    def numbers(self) -> list[int]:
        """Of the kinds that the table may hold."""
        if not isinstance(self.table, np.ndarray):
            return list(range(len(self.kinds)))
        return np.unique(_kind_of(self.table)).tolist()

    def visits(self, batch: int) -> int:
        """Tiles that all batch elements visit; where that is traced, at most."""
        if not isinstance(self.table, np.ndarray):
            return batch * self.table.shape[1]
        return int((_kind_of(self.table) != 0).sum()) * (batch // self.table.shape[0])


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
    return entry >> BLOCK_BITS + KIND_BITS, entry >> KIND_BITS & (1 << BLOCK_BITS) - 1


def step_at(schedule: Schedule, table, b, step) -> Step:
    steps = table.shape[1]
    major, minor = blocks_at(table, b, step)
    kind = _kind_of(_entry(table, b, step))
    if schedule.single:
        return Step(major, minor, kind, True, True)
    before, _ = blocks_at(table, b, jnp.maximum(step - 1, 0))
    after, _ = blocks_at(table, b, jnp.minimum(step + 1, steps - 1))
    end = pl.num_programs(2) - 1
    opens, closes = (step == 0) | (before != major), (step == end) | (after != major)
    return Step(major, minor, kind, opens, closes)


def _entry(table, b, step):
    return table[b if table.shape[0] > 1 else 0, step]


def _kind_of(entry):
    return entry & (1 << KIND_BITS) - 1


def walk(seen: Seen, by: str, every: bool = False) -> Schedule:
    """The tiles not skipped, sorted by "queries" or "keys", each of their blocks at least once.

    With `every` the others are listed too, to be skipped: for a kernel whose output has a block for every tile.
    """
    kind = seen.kind.swapaxes(1, 2) if by == "keys" else seen.kind
    xp = np if isinstance(kind, np.ndarray) else jnp
    batch, _, minors = kind.shape
    lonely = ~(kind != 0).any(2, keepdims=True) & (xp.arange(minors) == 0)
    touched = ((kind != 0) | lonely | every).reshape(batch, -1)
    kind, count = kind.reshape(batch, -1), touched.sum(1)
    tiles = touched.shape[1] if xp is jnp else int(count.max())

    order = xp.argsort(~touched, axis=1, stable=True)
    position = xp.arange(tiles)
    chosen = xp.take_along_axis(order, xp.minimum(position, count[:, None] - 1), axis=1)
    kind = xp.where(position < count[:, None], xp.take_along_axis(kind, chosen, axis=1), 0)
    table = (chosen // minors << BLOCK_BITS + KIND_BITS) | (chosen % minors << KIND_BITS) | kind
    return Schedule(table.astype(xp.int32), tiles if xp is np else count.max(), seen.kinds, minors == 1)


def tile_kinds(operands: Operands, problem: Problem) -> Seen:
    """Of which kind the tiles of a call are; all chunks of a tile are computed where what is seen is traced."""
    chunks, visibility = problem.block_k // problem.chunk, visibility_of(operands, problem.spec)
    if operands.mask is None and operands.q_segment_ids is None and operands.cu_seqlens_q is None:
        return _static_kinds(*visibility.blocks(problem.block_q, problem.chunk, np), chunks)
    touched, whole = visibility.blocks(problem.block_q, problem.block_k)
    kinds = (SKIPPED, Kind(0, chunks, True), Kind(0, chunks, False))
    return Seen(jnp.where(touched, jnp.where(whole, 2, 1), 0), kinds)


def _static_kinds(touched: np.ndarray, whole: np.ndarray, chunks: int) -> Seen:
    """From [1, q_blocks, chunks of all keys]."""
    in_tiles = lambda x: pad_axis(x, 2, -(-x.shape[2] // chunks) * chunks).reshape(*x.shape[:2], -1, chunks)
    touched, whole = in_tiles(touched), in_tiles(whole)
    some = touched.any(3)
    first = np.where(some, touched.argmax(3), 0)
    last = np.where(some, chunks - touched[..., ::-1].argmax(3), 0)
    masked = (touched & ~whole).any(3)
    kinds, kind = _distinct(first, last, masked)
    if sum(k.last - k.first for k in kinds) > MOST_CODE * chunks or len(kinds) > 1 << KIND_BITS:
        masked = some & ~(touched & whole).all(3)
        kinds, kind = _distinct(np.zeros_like(first), np.where(some, chunks, 0), masked)
    return Seen(kind, kinds)


def _distinct(first: np.ndarray, last: np.ndarray, masked: np.ndarray) -> tuple[tuple[Kind, ...], np.ndarray]:
    """The kinds that occur, SKIPPED before all, and the number of that of each tile."""
    found = np.stack([first, last, masked], -1).reshape(-1, 3)
    kinds, kind = np.unique(np.concatenate([[SKIPPED], found]), axis=0, return_inverse=True)
    named = tuple(Kind(int(first), int(last), bool(masked)) for first, last, masked in kinds)
    return named, kind.reshape(-1)[1:].reshape(first.shape)
