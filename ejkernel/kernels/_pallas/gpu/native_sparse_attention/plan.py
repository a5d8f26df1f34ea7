"""The static plan of the kernel: how queries, heads and blocks of keys are laid out."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands
from ejkernel.types import KernelConfig

from .._inline.rows import TILE_COLUMNS, TILE_ROWS
from .._launch import FIRST_BARRIER, PER_ROW, ROWS
from ..flash_attention.problem import LOG2_E
from .configs import BLOCK_K

# Named barriers: the empty stages.
EMPTY = FIRST_BARRIER


@dataclass(frozen=True)
class Plan:
    """The shapes of one call, and how it is divided.

    Attributes:
        B, S, K, H, G, D, V: batch, queries, keys, query heads, key/value heads, features of keys and of values.
        size: keys of a block of the lists.
        scale: the factor of q·k.
        dtype: of q, k and v.
        consumers: consumer warpgroups.
        stages: blocks of keys and values in shared memory.
    """

    B: int
    S: int
    K: int
    H: int
    G: int
    D: int
    V: int
    size: int
    scale: float
    dtype: np.dtype
    consumers: int
    stages: int

    @property
    def heads(self) -> int:
        """Query heads that share a key/value head: a query's rows."""
        return self.H // self.G

    @property
    def queries_of_warpgroup(self) -> int:
        return ROWS // self.heads

    @property
    def queries(self) -> int:
        """Of a tile."""
        return self.consumers * self.queries_of_warpgroup

    @property
    def tiles(self) -> int:
        """Of a group."""
        return -(-self.S // self.queries)

    @property
    def blocks(self) -> int:
        """Thread blocks."""
        return self.B * self.G * self.tiles

    @property
    def key_rows(self) -> int:
        """Of a batch element: TMA copies tiles of 8 rows, which begin at a multiple of 8."""
        return -(-self.K // TILE_ROWS) * TILE_ROWS

    @property
    def warpgroups(self) -> int:
        return self.consumers + 1

    @property
    def parts(self) -> int:
        """Tiles of q: one for every 64 features."""
        return self.D // TILE_COLUMNS

    @property
    def steps_of_entry(self) -> int:
        """Blocks of 64 keys of an entry of a union."""
        return self.size // BLOCK_K

    @property
    def exponent(self) -> float:
        """The factor that makes q·k an exponent of 2."""
        return self.scale * LOG2_E

    def place(self) -> tuple[Array, Array, Array]:
        """Batch, group and tile of this thread block. Tiles of a group are neighbours, the last, and longest, first."""
        block, tiles, groups = lax.axis_index("block"), jnp.int32(self.tiles), jnp.int32(self.G)
        group = lax.div(block, tiles)
        return lax.div(group, groups), lax.rem(group, groups), tiles - 1 - lax.rem(block, tiles)

    def query_of_rows(self) -> Array:
        """Which of a warpgroup's queries each of its rows has."""
        return lax.div(plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW), jnp.int32(self.heads))

    def limit(self, query: Array) -> Array:
        """A query sees the keys before it."""
        return query + (self.K - self.S + 1)


def plan_of(x: Operands, spec: NativeSparseAttentionSpec, config: KernelConfig) -> Plan:
    """The plan of a call (arrays or shapes)."""
    (B, S, H, D), (_, K, G, V) = x.q.shape, x.v.shape
    return Plan(
        B, S, K, H, G, D, V, spec.block_size, spec.softmax_scale, np.dtype(x.q.dtype), config.block_q // ROWS,
        config.num_stages,
    )  # fmt: skip
