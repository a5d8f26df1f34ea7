"""The static plan of the forward: block sizes, stages, shared memory, barriers, and the tile scheduler."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._visibility import BlockRanges

from .._inline.registers import e4m3_operand
from .._launch import FIRST_BARRIER, ROWS, arrive, stage_of, sync
from . import quantized
from .configs import SHARED_BYTES, shared_bytes
from .head_dims import row_width
from .mask_info import MaskInfo
from .problem import Problem, blocks_of_band
from .quantized import Scales, Units
from .tile_scheduler import L2_BYTES, DynamicTileScheduler, PersistentTileScheduler, SingleTileScheduler
from .tiles import LIMITS, RescaleLimits

# Registers of a thread of a consumer and of the producer, by the number of consumer warpgroups; one has enough anyway.
REGISTERS = {2: (232, 40), 3: (160, 32)}
# Named barriers: q is empty; then ping-pong, one for each consumer; then the empty stages of k, and those of v.
Q_EMPTY = FIRST_BARRIER
PING_PONG = Q_EMPTY + 1
# Keys that a query sees at most, from which on a launch is long enough for several waves: a thread block takes about
# 3 us to start.
LEAST_KEYS_OF_WAVES = 4096


@dataclass(frozen=True)
class Plan:
    """A problem, its block sizes, in how many bits, whether lists of blocks say what is computed, whether there are a
    bias and a mask, and on how many multiprocessors it is scheduled.
    """

    problem: Problem
    block_q: int
    block_k: int
    stages: int
    e4m3: bool = False
    listed: bool = False
    bias: bool = False
    mask: bool = False
    processors: int = field(default_factory=lambda: gpu_target().core_count)

    @property
    def consumers(self) -> int:
        """Consumer warpgroups; there is one producer."""
        return self.block_q // ROWS

    @property
    def warpgroups(self) -> int:
        return self.consumers + 1

    @property
    def registers(self) -> tuple[int, ...] | None:
        """Registers of a thread of a consumer and of the producer, if they are to differ."""
        return REGISTERS.get(self.consumers)

    @property
    def q_tiles(self) -> int:
        return -(-self.problem.S // self.block_q)

    @property
    def persistent(self) -> bool:
        return self.shared_bytes(persistent=True) <= SHARED_BYTES

    @property
    def costs_are_traced(self) -> bool:
        """Whether arrays decide how many blocks of keys a work tile has."""
        return self.listed or self.problem.masked_by_arrays

    @property
    def zeroes_hidden(self) -> bool:
        """Whether the producer overwrites hidden values in shared memory; otherwise they are zero in device memory."""
        return self.problem.masked_by_arrays and not (self.listed or self.mask or self.e4m3)

    @property
    def queued(self) -> bool:
        """Whether a thread block takes its work tiles from a queue."""
        return self.persistent and self.costs_are_traced

    @property
    def q_stages(self) -> int:
        return 2 if self.persistent else 1

    @property
    def q_in_registers(self) -> bool:
        """Whether q stays in registers: with 64 features it fits, and products read a third less from shared memory."""
        return max(self.problem.D_tile, self.problem.V_tile) <= 64 and not self.e4m3

    @property
    def k_empty(self) -> int:
        return PING_PONG + self.consumers

    @property
    def v_empty(self) -> int:
        return self.k_empty + self.stages

    @property
    def sums(self) -> Any:
        """The dtype in which q·kᵀ is summed."""
        return jnp.float16 if self.e4m3 else jnp.float32

    @property
    def tanh_by_polynomial(self) -> bool:
        """Whether a block without a mask has its softcap by `powers_of_softcap`, whose coefficients are in range."""
        softcap = self.problem.softcap
        if softcap is None or self.e4m3 or self.mask:
            return False
        return 2.0**-18 < self.problem.scale / softcap < 2.0**18

    @property
    def limits(self) -> RescaleLimits:
        return quantized.LIMITS if self.e4m3 else LIMITS

    def shared_bytes(self, persistent: bool) -> int:
        blocks = self.block_q, self.block_k, self.stages
        return shared_bytes(blocks, self.problem.D, self.problem.V, persistent, self.e4m3, self.bias)

    @property
    def bytes_of_a_key(self) -> int:
        """Bytes of a key and its value in device memory."""
        return (self.problem.D + self.problem.V) * self.problem.dtype.itemsize

    @cached_property
    def scheduler(self) -> PersistentTileScheduler | SingleTileScheduler | DynamicTileScheduler:
        problem, heads = self.problem, self.problem.H * self.problem.B
        if self.listed or self.queued:
            return DynamicTileScheduler(self.q_tiles, heads, self.persistent, self.processors)
        if self.persistent:
            later_tiles_are_longer = problem.high is not None and problem.low is None
            long = problem.most_keys >= LEAST_KEYS_OF_WAVES
            return PersistentTileScheduler(self.q_tiles, heads, later_tiles_are_longer, self.processors, long)
        together = max(1, L2_BYTES // (problem.K * self.bytes_of_a_key)) * problem.group
        longer = problem.high is not None
        return SingleTileScheduler(
            self.q_tiles, heads, together, later_tiles_are_longer=longer, processors=self.processors
        )

    def tile(self, work_tile: Array, longest_first: Any = None) -> tuple[Array, Array, Array]:
        """The first query, the head and the batch index of this thread block's n-th work tile."""
        return self.placed(*self.scheduler.tile(lax.axis_index("block"), work_tile, longest_first))

    def placed(self, place: Array, head: Array) -> tuple[Array, Array, Array]:
        """The first query, the head and the batch index of a place in a head, of all."""
        heads = np.int32(self.problem.H)
        return place * self.block_q, lax.rem(head, heads), lax.div(head, heads)

    def work_tiles(self, longest_first: Any) -> Array:
        """The number of work tiles of this thread block."""
        return self.scheduler.work_tiles(lax.axis_index("block"), longest_first)

    def ping_pong(self, number: Array, begin: Callable[[], Any]) -> Any:
        """Waits for this consumer's ping-pong barrier, issues its products, and signals the next consumer."""
        sync(PING_PONG + number, 2)
        products = begin()
        arrive(PING_PONG + stage_of(number + 1, self.consumers), 2)
        return products

    def block_range(self, first: Array, head: Array, batch: Array, mask_info: MaskInfo | None) -> BlockRanges:
        if mask_info is not None:
            return mask_info.block_range(lax.div(first, np.int32(self.block_q)), batch, head)
        return blocks_of_band(first, self.block_q, self.problem.low, self.problem.high, self.problem.K, self.block_k)

    def block(self, n: Array, first: Array, head: Array, batch: Array, mask_info: MaskInfo | None) -> Array:
        """Block n of the `block_range` of these queries."""
        if mask_info is None:
            return n
        return mask_info.block(n, lax.div(first, np.int32(self.block_q)), batch, head)

    def units(self, scales: Scales | None, batch: Array, head: Array, first: Array) -> Units | None:
        """The scales in e4m3 of the queries from `first` on."""
        if scales is None:
            return None
        queries = scales.queries[batch, head, lax.div(first, np.int32(self.block_q))]
        return Units(queries, scales, (batch, lax.div(head, np.int32(self.problem.group))))

    def operand(self, p: Array) -> Array:
        """The weights as the product with v takes them."""
        return e4m3_operand(p) if self.e4m3 else p.astype(self.problem.dtype)

    @property
    def values_widest(self) -> int:
        """The widest row of v in shared memory: a product sums over as many keys at a time as a row has features."""
        return row_width(self.block_k)
