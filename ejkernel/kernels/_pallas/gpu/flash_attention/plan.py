"""The plan that all warpgroups of the forward follow: the blocks of a problem, its memory, and who has which tile."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._visibility import BlockRanges

from .._launch import FIRST_BARRIER, ROWS, arrive, slot_of, sync
from . import quantized
from .mask_info import MaskInfo
from .order import CACHED, Each, Walk
from .problem import Problem, blocks_of_band
from .quantized import Scales, Units
from .tiles import HALF, Bounds

# The shared memory that a block of threads may use.
SHARED_BYTES = 227 * 1024
# Registers of a thread that computes and of one that loads, by how many warpgroups compute.
REGISTERS = {2: (232, 40), 3: (160, 32)}
# Named barriers: q may be overwritten; and from here on the turns of the consumers, the slots of k, and those of v.
Q_FREE = FIRST_BARRIER
TURN = Q_FREE + 1


@dataclass(frozen=True)
class Plan:
    """A problem, its blocks, in how many bits, and how the tiles are dealt out to the multiprocessors."""

    problem: Problem
    block_q: int
    block_k: int
    stages: int
    e4m3: bool = False
    processors: int = field(default_factory=lambda: gpu_target().core_count)

    @property
    def consumers(self) -> int:
        """Warpgroups that compute; one more loads."""
        return self.block_q // ROWS

    @property
    def warpgroups(self) -> int:
        return self.consumers + 1

    @property
    def q_tiles(self) -> int:
        return -(-self.problem.S // self.block_q)

    @property
    def persistent(self) -> bool:
        return self.shared_bytes(persistent=True) <= SHARED_BYTES

    @property
    def q_slots(self) -> int:
        return 2 if self.persistent else 1

    @property
    def holds_q(self) -> bool:
        """q stays in registers. It takes few of 64 features, and every product reads a third less of shared memory."""
        return self.problem.D == 64 and not self.e4m3

    @property
    def k_free(self) -> int:
        return TURN + self.consumers

    @property
    def v_free(self) -> int:
        return self.k_free + self.stages

    @property
    def sums(self) -> Any:
        """The dtype in which q·kᵀ is summed."""
        return jnp.float16 if self.e4m3 else jnp.float32

    @property
    def bounds(self) -> Bounds:
        return quantized.BOUNDS if self.e4m3 else HALF

    def shared_bytes(self, persistent: bool) -> int:
        """Bytes of shared memory: the tiles, and room for the rest."""
        D, V, size = self.problem.D, self.problem.V, self.problem.dtype.itemsize
        tile_size = 1 if self.e4m3 else size
        q, o = self.block_q * D * tile_size, self.block_q * V * size
        streamed = self.stages * self.block_k * (D + V) * tile_size
        return (2 * q + o if persistent else max(q, o)) + streamed + 2048

    @property
    def bytes_of_a_key(self) -> int:
        """With its value."""
        return (self.problem.D + self.problem.V) * self.problem.dtype.itemsize

    @property
    def order(self) -> Walk | Each:
        problem, heads = self.problem, self.problem.H * self.problem.B
        if self.persistent:
            rising = problem.high is not None and problem.low is None
            return Walk(self.q_tiles, heads, rising, self.processors)
        together = max(1, CACHED // (problem.K * self.bytes_of_a_key)) * problem.group
        return Each(self.q_tiles, heads, together, problem.high is not None, self.processors)

    def tile(self, turn: Array, dealt: Any = None) -> tuple[Array, Array, Array]:
        """The first query, the head and the batch index of the tile that this block has in its `turn`."""
        place, head = self.order.tile(lax.axis_index("block"), turn, dealt)
        heads = jnp.int32(self.problem.H)
        return place * self.block_q, lax.rem(head, heads), lax.div(head, heads)

    def turns(self, dealt: Any) -> Array:
        """How many tiles this block has."""
        return self.order.turns(lax.axis_index("block"), dealt)

    def in_turn(self, number: Array, begin: Callable[[], None]) -> None:
        """Begins products of a warpgroup; the one that follows it begins its own after them."""
        sync(TURN + number, 2)
        begin()
        arrive(TURN + slot_of(number + 1, self.consumers), 2)

    def visited(self, first: Array, batch: Array, mask_info: MaskInfo | None) -> BlockRanges:
        if mask_info is not None:
            return mask_info.visited(lax.div(first, jnp.int32(self.block_q)), batch)
        return blocks_of_band(first, self.block_q, self.problem.low, self.problem.high, self.problem.K, self.block_k)

    def units(self, scales: Scales | None, batch: Array, head: Array, first: Array) -> Units | None:
        """In e4m3, what is computed of the queries from `first` on is in these."""
        if scales is None:
            return None
        queries = scales.queries[batch, head, lax.div(first, jnp.int32(self.block_q))]
        return Units(queries, scales, (batch, lax.div(head, jnp.int32(self.problem.group))))

    def operand(self, p: Array) -> Array:
        """The weights as the product with v takes them."""
        return quantized.operand(p) if self.e4m3 else p.astype(self.problem.dtype)

    def values(self, tile: Any) -> Any:
        """A block of v as that product takes it: in e4m3 the keys are innermost."""
        return tile.T if self.e4m3 else tile
