"""The operands and compile-time constants of a call of blocksparse_attention, as its kernels take them."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._triton.flash_attention.problem import (
    Problem,
    keys_as_segments,
    problem_of,
    segment_ranges_of,
)
from ejkernel.kernels._visibility import visibility_of
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands

from .configs import tile_sizes
from .lists import Lists, lists_of_keys, lists_of_queries, tiles_to_compute


@dataclass(frozen=True, eq=False)
class Call:
    """The operands of a call, and the compile-time constants of its kernels.

    The blocks of the mask divide the packed tokens, not single sequences, and so do tiles. To the kernels a packed call
    is a dense one in which query i sees the keys first_keys[i] ≤ j < stop_keys[i], and `problem` has neither sequences
    nor band. A query outside of all sequences has first_keys −1 and stop_keys 0.

    Attributes:
        operands: the operands, with a mask over keys as segment ids.
        spec: what is computed.
        problem: the shapes and options.
        intervals: first_keys and stop_keys, int32 [B, S]; (None, None) in a dense call.
    """

    operands: Operands
    spec: BlocksparseAttentionSpec
    problem: Problem
    intervals: tuple[Array | None, Array | None]

    @property
    def arrays(self) -> tuple[Array | None, ...]:
        """The first arguments of every kernel: q, k, v, bias, mask, the segment ids, sinks, softmax_scale, dropout."""
        cuts = ("cu_seqlens_q", "cu_seqlens_k")
        return tuple(x for name, x in self.operands.attention._asdict().items() if name not in cuts)

    @property
    def hides_tokens(self) -> bool:
        """Whether more than the band hides pairs within kept tiles, which may fully mask a token."""
        x = self.operands
        return any(a is not None for a in (x.mask, x.q_segment_ids, self.intervals[0]))

    @property
    def is_edged(self) -> bool:
        """Whether a tile of any size may be partly masked."""
        p = self.problem
        return p.segmented or p.left is not None or p.right is not None or self.intervals[0] is not None

    @property
    def lists_are_of_groups(self) -> bool:
        """Whether there is one list of tiles of queries for all heads of a group."""
        return self.operands.block_mask.shape[1] > 1

    def with_arrays(self, **arrays: Array) -> "Call":
        return replace(self, operands=self.operands._replace(**arrays))

    def tile(self, block_q: int, block_k: int) -> tuple[int, int]:
        """The size of a tile within blocks of the mask that has at most block_q queries and block_k keys."""
        return tile_sizes(self.operands, self.spec, block_q, block_k)

    def kept(self, tile: tuple[int, int]) -> Array:
        """Which tiles have to be computed, bool [b?,h?,rows,columns]."""
        return tiles_to_compute(self.operands, self.spec, tile)

    def lists_of_keys(self, tile: tuple[int, int]) -> Lists:
        return lists_of_keys(self.operands, self.spec, tile)

    def lists_of_queries(self, tile: tuple[int, int]) -> Lists:
        return lists_of_queries(self.operands, self.spec, tile)

    def segment_ranges(self, tile: tuple[int, int], of_keys: bool = False) -> Array | None:
        """The ranges of `segment_ranges_of`, by which a kernel finds the tiles that need no segment ids."""
        return segment_ranges_of(self.operands.attention, *tile, of_keys=of_keys)

    def checked(self, tile: tuple[int, int], over_keys: bool) -> bool:
        """Whether a loop over tiles of keys (or queries) contains tokens that must not be loaded.

        These are tokens past the end, and those that the band hides from every query (or key) of the stationary tile.
        There are none of the latter if the band begins and ends at the edges of tiles: then every token of a tile is
        seen, if not within the stationary tile then within its block.
        """
        p, (block_q, block_k) = self.problem, self.spec.block_size
        length, size = (p.K, tile[1]) if over_keys else (p.S, tile[0])
        other, block = (p.S, block_q) if over_keys else (p.K, block_k)
        ends = [end for end in ((p.left, -1), (p.right, 1)) if end[0] is not None]
        if not ends:
            return length % size != 0
        misaligned = any((p.K - p.S + sign * bound) % size for bound, sign in ends)
        straddled = block < other and block % size != 0
        return length % size != 0 or misaligned or straddled or any(bound < 0 for bound, _ in ends)


def call_of(operands: Operands, spec: BlocksparseAttentionSpec) -> Call:
    """The `Call` with these operands of the primitive."""
    attention, intervals = keys_as_segments(operands.attention), (None, None)
    if attention.cu_seqlens_q is not None:
        visibility = visibility_of(attention, spec)
        (first, stop), (_, is_inside) = visibility.intervals(), visibility.sequences()
        of_rows = operands.q.shape[:2]
        intervals = tuple(jnp.broadcast_to(x, of_rows) for x in (jnp.where(is_inside, first, -1), stop))
    problem = problem_of(attention._replace(cu_seqlens_q=None, cu_seqlens_k=None), spec)
    if attention.cu_seqlens_q is not None:
        problem = replace(problem, left=None, right=None)
    return Call(Operands(**attention._asdict(), block_mask=operands.block_mask), spec, problem, intervals)
