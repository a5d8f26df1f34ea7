"""The loop over the tiles of the logits that a block mask keeps, in time proportional to their number.

Tiles are numbered, and the device lists those that are kept and not fully masked by causality, window or sequences. If
a block mask differs between batch elements or heads, a tile belongs to one of them, otherwise to all together.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from ejkernel.primitives import flash_attention as flash
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.types import KernelConfig

from .._visibility import visibility_of
from . import _attention as attention
from . import _tiles as tiles
from ._attention import Folded

# The place of a tile: batch element, group, member of the group, row and column of its first logit.
Place = tuple[Any, Any, Any, Any, Any]


class Kept(NamedTuple):
    """The numbers of all tiles, the `count` kept ones first, and the block mask by tiles.

    The latter has the blocks of every tile, [b?,g?,r?,rows,columns], or is None if each tile is within one block.
    """

    order: Array
    count: Array
    blocks: Array | None


@dataclass(frozen=True, eq=False)
class KeptTiles:
    """The tiles of the logits that are computed, like `Grid`, but known only when the program runs.

    Attributes:
        size: rows and columns of a tile.
        shape: rows and columns of all the logits, without padding.
        padding: rows and columns appended to make whole tiles.
        counts: numbers of batch elements, groups and members of a group, each 1 if a tile belongs to all of them, and
            of tiles along the rows and along the columns.
        block: rows and columns of a block.
        blocks_per_tile: rows and columns of blocks in a tile.
        masks: whether logits of a kept tile may be masked by more than the block mask.
        kept: the list of kept tiles.
    """

    size: tuple[int, int]
    shape: tuple[int, int]
    padding: tuple[int, int]
    counts: tuple[int, ...]
    block: tuple[int, int]
    blocks_per_tile: tuple[int, int]
    masks: bool
    kept: Kept

    def sweep(self, of_tile: Callable, x: tuple, add: Callable, nothing: Callable[[], Any]) -> Any:
        """Adds of_tile(*tile of x) of every kept tile to its part of the totals, as `Grid.sweep` does for all tiles.

        JAX cannot differentiate a loop of unknown length in reverse. So derivatives, which are those of second order
        and beyond, are taken of a loop over all tiles that skips the rest.
        """
        if 0 in self.counts:
            return nothing()
        loop = partial(self._loop, of_tile, add, nothing)
        swept = jax.custom_jvp(partial(loop, _over_kept))
        swept.defjvp(partial(_jvp, partial(loop, _over_all)), symbolic_zeros=True)
        return swept(x, self.kept)

    def _loop(self, of_tile: Callable, add: Callable, nothing: Callable, over: Callable, x: tuple, kept: Kept) -> Any:
        def part(x, number):
            first, *others = (self._tile(a, self._place(number, self.size)) for a in x)
            return of_tile(first._replace(mask=self._mask(first, kept, number)), *others)

        def put(totals, part, number):
            place = self._place(number, self.size)
            # The barrier keeps XLA from fusing the slices into what follows the update, which would copy all totals.
            before = lax.optimization_barrier(self._tile(totals, place))
            return self._put(totals, add(before, part), place)

        return over(part, put, x, kept, tiles.varying_like((x, kept), nothing()), self._tile)

    def _place(self, number: Array, size: tuple[int, int]) -> Place:
        """The place of a tile in an array with `size` rows and columns per tile."""
        *element, row, column = jnp.unravel_index(number, self.counts)
        return (*element, row * np.uint32(size[0]), column * np.uint32(size[1]))

    def _mask(self, x: Folded, kept: Kept, number: Array) -> Array | None:
        """The mask of a tile, combined with that of its blocks; None if nothing of it is masked."""
        if kept.blocks is None:
            return x.mask if self.masks else None
        mask = self._slice("mask", kept.blocks, self._place(number, self.blocks_per_tile), self.blocks_per_tile)
        for axis, block, length in zip((3, 4), self.block, self.size, strict=True):
            mask = lax.slice_in_dim(jnp.repeat(mask, min(block, length), axis), 0, length, axis=axis)
        return x.mask & mask

    def _tile(self, x: Any, place: Place) -> Any:
        """The parts of arrays, named by `tiles.AXES`, that belong to a tile."""
        return tiles.map_named(lambda name, a: self._slice(name, a, place, self.size), x)

    def _slice(self, name: str, a: Array, place: Place, size: tuple[int, int]) -> Array:
        starts, sizes = [np.uint32(0)] * a.ndim, list(a.shape)
        for axis, n in self._axes(name, a):
            starts[axis], sizes[axis] = place[n], (1, 1, 1, *size)[n]
        return a if tuple(sizes) == a.shape else lax.dynamic_slice(a, starts, sizes)

    def _put(self, totals: Any, parts: Any, place: Place) -> Any:
        """The totals with a tile's part of them replaced."""

        def replaced(name, total, part):
            starts = [np.uint32(0)] * total.ndim
            for axis, n in self._axes(name, total):
                starts[axis] = place[n]
            return part if part.shape == total.shape else lax.dynamic_update_slice(total, part, starts)

        return tiles.map_named(replaced, totals, parts)

    def _axes(self, name: str, a: Array) -> list[tuple[int, int]]:
        """The axes that are cut, each with its index in a place."""
        elements = range(2 if name in _OF_GROUPS else 3)
        cut = [(axis, axis) for axis in elements if self.counts[axis] != 1 and a.shape[axis] != 1]
        return cut + [(axis, 3 + side) for axis, side in tiles.tiled_axes(name, a)]


# Arrays without an axis of the members of a group.
_OF_GROUPS = ("k", "v", "dk", "dv")


def _over_kept(part: Callable, put: Callable, x: tuple, kept: Kept, totals: Any, tile: Callable) -> Any:
    step = lambda n, totals: put(totals, part(x, kept.order[n]), kept.order[n])
    return lax.fori_loop(0, kept.count, step, totals)


def _over_all(part: Callable, put: Callable, x: tuple, kept: Kept, totals: Any, tile: Callable) -> Any:
    """`_over_kept` as a loop of constant length, whose derivatives recompute tiles instead of storing them."""
    nothing = tile(totals, (np.uint32(0),) * 5)

    @partial(jax.checkpoint, prevent_cse=False)
    def part_if_kept(x, number, is_kept):
        return lax.cond(is_kept, part, lambda *_: nothing, x, number)

    def step(totals, at):
        return put(totals, part_if_kept(x, *at), at[0]), None

    is_kept = jnp.arange(kept.order.shape[0], dtype=jnp.int32) < kept.count
    return lax.scan(step, totals, (kept.order, is_kept))[0]


def _jvp(f: Callable, primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    """The jvp of f by those of its arguments that have a tangent."""
    leaves, structure = jax.tree.flatten(primals)
    tangents_by_leaf = {n: t for n, t in enumerate(jax.tree.leaves(tangents)) if not isinstance(t, SymbolicZero)}

    def of(*varied):
        new = dict(zip(tangents_by_leaf, varied, strict=True))
        return f(*structure.unflatten([new.get(n, x) for n, x in enumerate(leaves)]))

    return jax.jvp(of, tuple(leaves[n] for n in tangents_by_leaf), tuple(tangents_by_leaf.values()))


# --- The list of kept tiles -------------------------------------------------------------------------------------------


def cut(
    operands: Operands, spec: BlocksparseAttentionSpec, config: KernelConfig
) -> tuple[Folded, KeptTiles | tiles.Grid]:
    """The operands padded to whole tiles, and the tiles that are kept.

    If a length is symbolic, all the logits are one tile.
    """
    shape = operands.q.shape[1], operands.k.shape[1]
    if any(map(jax.export.is_symbolic_dim, shape)):
        return tiles.cut(within_blocks(operands, spec), spec, config)
    x, mask = operands.attention, attention.fold_heads(operands.block_mask, operands.k.shape[2])
    size, blocks_per_tile = zip(*map(_length, shape, spec.block_size, (config.block_q, config.block_k)), strict=True)
    padding = -shape[0] % size[0], -shape[1] % size[1]
    folded = tiles.pad(attention.folded(x, spec, any(padding)), padding)
    masks = attention.hides(folded)
    if folded.mask is None:
        folded = folded._replace(mask=jnp.ones((1,) * 5, bool))
    numbers = tuple(math.ceil(n / of) for n, of in zip(shape, size, strict=True))
    for axis, of_axis in enumerate(zip(numbers, size, blocks_per_tile, spec.block_size, strict=True), 3):
        mask = _blocks_of_tiles(mask, axis, *of_axis)
    b, g, r, *_ = mask.shape
    some = mask.reshape(b, g, r, numbers[0], blocks_per_tile[0], numbers[1], blocks_per_tile[1]).any((4, 6))
    some = some & _may_see(x, spec, size, of_batch=b > 1)
    listed = _listed(some, None if blocks_per_tile == (1, 1) else mask)
    return folded, KeptTiles(size, shape, padding, some.shape, spec.block_size, blocks_per_tile, masks, listed)


def within_blocks(operands: Operands, spec: BlocksparseAttentionSpec) -> flash.Operands:
    """The operands of flash_attention, with the block mask expanded to a mask of the size of the logits."""
    mask = operands.block_mask
    for axis, length, block in zip((2, 3), (operands.q.shape[1], operands.k.shape[1]), spec.block_size, strict=True):
        number = lax.div(lax.iota(jnp.int32, length), jnp.int32(block))
        mask = jnp.take(mask, number, axis=axis, mode="fill", fill_value=False)
    return operands.attention._replace(mask=mask if operands.mask is None else mask & operands.mask)


def _length(length: int, block: int, wanted: int) -> tuple[int, int]:
    """The length of a tile, about as wanted, of whole blocks or an equal part of one; and the blocks that it holds."""
    if block > wanted:
        least = math.ceil(block / wanted)
        parts = next((n for n in range(least, 2 * least) if block % n == 0), 1)
        return min(block // parts, max(1, length)), 1
    blocks_per_tile = max(1, min(wanted // block, math.ceil(length / block)))
    return min(blocks_per_tile * block, max(1, length)), blocks_per_tile


def _blocks_of_tiles(mask: Array, axis: int, tiles: int, size: int, blocks_per_tile: int, block: int) -> Array:
    """The block mask with, along an axis, the blocks of each tile, tile by tile."""
    if blocks_per_tile == 1:
        return jnp.take(mask, np.arange(tiles) * size // block, axis=axis)
    widths = [(0, tiles * blocks_per_tile - mask.shape[axis] if a == axis else 0, 0) for a in range(mask.ndim)]
    return lax.pad(mask, np.array(False), widths)


def _may_see(x: flash.Operands, spec: BlocksparseAttentionSpec, size: tuple[int, int], of_batch: bool) -> Array:
    """Which tiles may have visible logits before any mask: bool [b?,1,1,rows,columns]."""
    some, _ = visibility_of(x._replace(mask=None), spec).blocks(*size)
    return lax.expand_dims(some if of_batch else some.any(0, keepdims=True), (1, 2))


def _listed(some: Array, blocks: Array | None) -> Kept:
    order = jnp.nonzero(some.reshape(-1), size=some.size, fill_value=0)[0]
    return Kept(order.astype(jnp.uint32), some.sum(dtype=jnp.int32), blocks)
