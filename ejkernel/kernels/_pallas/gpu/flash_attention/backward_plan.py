"""The static plan of the backward: block sizes, stages, barriers, and the tile scheduler."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ejkernel.kernels._target import gpu_target

from .._launch import FIRST_BARRIER, ROWS
from .configs import SHARED_BYTES, bytes_of_backward, columns_of_keys
from .dq_semaphore import MOST_IN_GROUP
from .feature_tiles import Tiles
from .head_dims import parts_of
from .problem import Problem
from .tile_scheduler import SingleTileScheduler

# Two consumers of dK and dV; the third warpgroup loads, and accumulates dQ.
WARPGROUPS = 3
# Named barriers: k and v may be overwritten, and then have been; p is full, and empty; then the empty stages of q, and
# the full ones of ds.
DONE = STORED = FIRST_BARRIER
P_FULL, P_EMPTY = DONE + 1, DONE + 2
Q_EMPTY = P_EMPTY + 1
# Queries that are computed at once where registers are scarce.
FEW = 32
# Tiles of a head that run at once where each adds to dq after the one before it, and twice as many where query heads
# share keys: more would wait longer at their beginning, fewer would load the queries of more heads from device memory.
TILES_AT_ONCE = 8


class Shared(NamedTuple):
    """Tiles in the shared memory of a thread block, and their full and empty barriers.

    k and v are stationary; q and do are streamed, and so are the numbers of their rows that products begin with: −lse /
    scale as `start`, and −delta as `delta`. A consumer leaves ds there, and p where the other one needs it. Of dq there
    are tiles of the widths of `Plan.dq_chunks`. That q is empty, and ds is full, is said by named barriers. A
    stage of the bias, in tiles of 64 keys, is full and empty when that of q is.
    """

    k: Tiles
    v: Tiles
    q: Tiles
    do: Tiles
    start: Any
    delta: Any
    ds: Any
    p: Any
    dq: Any
    kv_full: Any
    q_full: Any
    do_full: Any
    ds_empty: Any
    bias: Tiles | None = None


@dataclass(frozen=True)
class Plan:
    """A problem, its blocks of queries, how many of them are in flight, and how it is scheduled.

    deterministic: dq is added up in a certain order (dq_semaphore.py). listed: lists say which blocks of queries there
    are. bias, mask: there is one. dbias: its gradient is asked for. splits: the thread blocks that share the steps of
    a tile of keys, each with a dk and dv of its own (_query_splits.py).
    """

    problem: Problem
    block_q: int
    stages: int
    deterministic: bool = False
    listed: bool = False
    bias: bool = False
    mask: bool = False
    dbias: bool = False
    splits: int = 1
    processors: int = field(default_factory=lambda: gpu_target().core_count)

    @property
    def zeroes_hidden(self) -> bool:
        """Whether the producer overwrites fully masked rows in shared memory; otherwise device memory has zeros."""
        return self.problem.masked_by_arrays and not (self.listed or self.mask)

    @property
    def tiles(self) -> int:
        """Tiles of keys of a head."""
        return -(-self.problem.K // self.keys)

    @property
    def blocks(self) -> int:
        """Blocks of queries of a head."""
        return -(-self.problem.S // self.block_q)

    @property
    def circular(self) -> bool:
        """Whether all tiles see all blocks of queries; then each begins with another one, and wraps around."""
        return self.deterministic and not self.problem.cut

    @property
    def in_tile_order(self) -> bool:
        """Whether each tile adds to dq after the tile before it, from the last block of queries to the first."""
        return self.deterministic and not self.circular

    @property
    def signals_late(self) -> bool:
        """Whether an addition to dq is counted a step after it was issued, and not waited for at once.

        The tile that waits for the count then starts later. That costs nothing if it is two steps behind anyway, and
        less than waiting if a step has several additions (wide dq).
        """
        return self.keys >= 2 * self.block_q or (self.in_tile_order and self.wide)

    @property
    def group(self) -> int:
        """How many tiles wait for one another in a circle."""
        return -(-self.tiles // -(-self.tiles // min(self.processors, MOST_IN_GROUP)))

    @property
    def wide(self) -> bool:
        """Whether dk and dv of 64 keys exceed a warpgroup's registers: then two have them, of the same keys."""
        return columns_of_keys(self.problem.D, self.problem.V) > 320

    @property
    def parts(self) -> list[slice]:
        """Slices of a block of queries that are computed at once: halves where dk and dv have 320 columns together."""
        size = FEW if 256 < columns_of_keys(self.problem.D, self.problem.V) <= 320 else self.block_q
        return [slice(begin, begin + size) for begin in range(0, self.block_q, size)]

    @property
    def widest(self) -> int:
        """The widest row of what is multiplied: products sum over the queries of a part, see `launch.shared`."""
        return FEW if len(self.parts) > 1 else ROWS

    @property
    def D_parts(self) -> tuple[slice, ...]:
        """The features of each part of q and k; ds is multiplied with each part in a product of its own."""
        return parts_of(self.problem.D, self.widest, even=True)

    @property
    def V_parts(self) -> tuple[slice, ...]:
        return parts_of(self.problem.V, self.widest)

    @property
    def dq_chunks(self) -> list[slice]:
        """The features of dq that are computed and added to device memory at once."""
        width = self.problem.D if self.problem.D <= 128 else ROWS
        return [slice(begin, min(begin + width, self.problem.D)) for begin in range(0, self.problem.D, width)]

    @property
    def key_blocks(self) -> int:
        """The number of blocks of 64 keys among the stationary keys of a thread block."""
        return 1 if self.wide else 2

    @property
    def keys(self) -> int:
        return self.key_blocks * ROWS

    @property
    def ds_stages(self) -> int:
        """Two, but one where a bias leaves no shared memory for the second."""
        return 1 if self.wide or (self.bias and self.shared_bytes(2) > SHARED_BYTES) else 2

    def shared_bytes(self, ds_stages: int) -> int:
        blocks = self.block_q, self.keys, self.stages
        return bytes_of_backward(blocks, self.problem.D, self.problem.V, ds_stages, self.bias)

    @property
    def ds_full(self) -> int:
        return Q_EMPTY + self.stages

    @cached_property
    def scheduler(self) -> SingleTileScheduler:
        """Schedules all tiles of a head at about the same time, so that their queries and dq stay in the L2 cache.

        Under a causal mask the first keys have most to do. Tiles that add to dq in turn follow the one before by a step
        or two, so that few tiles of a head run at once, of several heads. Of those that wait in a circle all of a group
        do, and the first groups of all heads come before the second ones.
        """
        heads, tiles, together = self.problem.G * self.problem.B * self.splits, self.tiles, 1
        if self.circular:
            heads, tiles = heads * -(-tiles // self.group), self.group
        elif self.in_tile_order:
            at_once = TILES_AT_ONCE * min(self.problem.group, 2)
            together = -(-heads // max(1, round(heads * at_once / self.processors))) if self.splits == 1 else heads
        return SingleTileScheduler(
            tiles,
            heads,
            together,
            later_tiles_are_longer=False,
            processors=self.processors,
            evens_out=not self.deterministic,
        )
