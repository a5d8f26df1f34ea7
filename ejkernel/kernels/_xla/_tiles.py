"""The loop over the tiles of the logits that are not fully masked, which stores nothing per tile.

The name of an array determines which of its axes holds the rows of the logits and which the columns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import KernelConfig, Target, band

from .._visibility import Visibility
from ._attention import Folded, folded

# The axes of rows and of columns of the logits in an array. An array without a name here, or with an axis of size 1,
# is the same for every tile.
AXES = (
    dict.fromkeys(("q", "o", "m", "l", "lse", "excess", "delta", "dq", "do", "dlse", "rows"), (-2, None))
    | dict.fromkeys(("k", "v"), (None, -2))
    | dict.fromkeys(("dk", "dv", "columns"), (None, -1))
    | dict.fromkeys(("bias", "dbias", "mask"), (-2, -1))
)
_PADDING = {"rows": -1, "columns": np.iinfo(np.int32).max}
Start = tuple[Any, Any]  # row and column of a tile's first logit, uint32, as JAX wraps negative signed indices
ORIGIN = (np.uint32(0), np.uint32(0))


@dataclass(frozen=True)
class Grid:
    """The tiles of the logits that are computed.

    Attributes:
        size: rows and columns of a tile.
        starts: the first row of each tile, and the first column, uint32.
        shape: rows and columns of all the logits, without padding.
        padding: rows and columns appended to make whole tiles.
        divided: there are sequences or segments, by which more tiles may be fully masked at run time.
    """

    size: tuple[int, int]
    starts: tuple[np.ndarray, np.ndarray]
    shape: tuple[int, int]
    padding: tuple[int, int]
    divided: bool

    def sweep(self, of_tile: Callable, x: tuple, add: Callable, nothing: Callable[[], Any]) -> Any:
        """Adds of_tile(*tile of x) of every tile, by add(total, part), to its part of the totals `nothing()`.

        The first of x is `Folded`. Totals and parts are named, and include the padding. Derivatives store only the
        start of a tile and recompute it.
        """
        tiles = len(self.starts[0])
        if tiles == 0:
            return nothing()
        if tiles == 1 and self.size == self.shape:
            return of_tile(*x)
        nothing = varying_like(x, nothing())

        @partial(jax.checkpoint, prevent_cse=False)
        def part(x, start):
            x = tuple(tile(a, start, self.size) for a in x)
            if not self.divided:
                return of_tile(*x)
            return lax.cond(_may_see(x[0]), of_tile, lambda *_: tile(nothing, ORIGIN, self.size), *x)

        def step(totals, start):
            return put(totals, add(tile(totals, start, self.size), part(x, start)), start), None

        return lax.scan(step, nothing, self.starts)[0]


def cut(operands: Operands, spec: FlashAttentionSpec, config: KernelConfig) -> tuple[Folded, Grid]:
    """The operands padded to whole tiles, and the tiles that causality and window leave, or all in a packed call.

    Blocks are made as equal as possible, so that padding is small: 1000 rows in blocks of at most 512 are 2 · 500. If a
    length is symbolic, all the logits are one tile.
    """
    s, t = shape = operands.q.shape[1], operands.k.shape[1]
    divided = operands.cu_seqlens_q is not None or operands.q_segment_ids is not None
    if any(map(jax.export.is_symbolic_dim, shape)):
        return folded(operands, spec), Grid(shape, tuple(np.zeros((2, 1), np.uint32)), shape, (0, 0), divided)
    blocks = zip(shape, (config.block_q, config.block_k), strict=True)
    size = tuple(math.ceil(n / math.ceil(n / block)) if n else 1 for n, block in blocks)
    padding = -s % size[0], -t % size[1]
    starts = _starts(
        shape, size, None if operands.cu_seqlens_q is not None else Visibility(s, t, *band(spec.causal, spec.window))
    )
    return pad(folded(operands, spec, any(padding)), padding), Grid(size, starts, shape, padding, divided)


def _starts(shape: tuple[int, int], size: tuple[int, int], within: Visibility | None) -> tuple[np.ndarray, np.ndarray]:
    """The starts of the tiles that are not fully masked, or of all."""
    row, column = np.meshgrid(*(np.arange(0, n, step) for n, step in zip(shape, size, strict=True)), indexing="ij")
    inside = np.ones(row.shape, bool) if within is None else within.blocks(*size, np)[0][0]
    return row[inside].astype(np.uint32), column[inside].astype(np.uint32)


def pad(x: Any, amount: tuple[int, int]) -> Any:
    """Arrays named by AXES, padded with rows and columns of 0, and of fully masked tokens."""

    def grow(name, a):
        widths = [(0, 0, 0)] * a.ndim
        for axis, side in tiled_axes(name, a):
            widths[axis] = (0, amount[side], 0)
        return lax.pad(a, np.array(_PADDING.get(name, 0)).astype(a.dtype), widths)

    return map_named(grow, x) if any(amount) else x


def tile(x: Any, start: Start, size: tuple[int, int]) -> Any:
    """The parts of arrays, named by AXES, that belong to a tile."""

    def part(name, a):
        starts, sizes = [np.uint32(0)] * a.ndim, list(a.shape)
        for axis, side in tiled_axes(name, a):
            starts[axis], sizes[axis] = start[side], size[side]
        return a if tuple(sizes) == a.shape else lax.dynamic_slice(a, starts, sizes)

    return map_named(part, x)


def put(totals: Any, parts: Any, start: Start) -> Any:
    """The totals with the parts of a tile replaced."""

    def replaced(name, total, part):
        starts = [np.uint32(0)] * total.ndim
        for axis, side in tiled_axes(name, total):
            starts[axis] = start[side]
        return part if part.shape == total.shape else lax.dynamic_update_slice(total, part, starts)

    return map_named(replaced, totals, parts)


def map_named(f: Callable[..., Array], *trees: Any) -> Any:
    """f(name, *arrays) for the arrays of each name in dicts or NamedTuples."""
    first, *others = trees if isinstance(trees[0], dict) else [tree._asdict() for tree in trees]
    mapped = {
        name: jax.tree.map(partial(f, name), value, *(other[name] for other in others)) for name, value in first.items()
    }
    return mapped if isinstance(trees[0], dict) else type(trees[0])(**mapped)


def tiled_axes(name: str, x: Array) -> list[tuple[int, int]]:
    """(axis, 0 for rows or 1 for columns) of the axes that are cut."""
    sides = enumerate(AXES.get(name, ()))
    return [(axis, side) for side, axis in sides if axis is not None and x.shape[axis] != 1]


def _may_see(x: Folded) -> Array:
    """Whether any row may see a column, by intervals of rows and by the least and the greatest segment ids."""
    axes, (rows, columns) = (1, 2, 3, 4), (x.rows, x.columns)
    rules = []
    if rows.stop is not None:
        rules.append(columns.key.min(axes) < rows.stop.max(axes))
    if rows.first is not None:
        first = jnp.where(rows.first < rows.stop, rows.first, np.iinfo(np.int32).max)
        rules.append(first.min(axes) <= columns.key.max(axes))
    if rows.segment is not None:
        rules.append(jnp.maximum(rows.segment.min(axes), 0) <= columns.segment.max(axes))
        rules.append(jnp.maximum(columns.segment.min(axes), 0) <= rows.segment.max(axes))
    return reduce(jnp.logical_and, rules).any()


def trim(x: Any, grid: Grid) -> Any:
    """Arrays named by AXES without the padding."""
    return tile(x, ORIGIN, grid.shape)


def varying_like(x: Any, arrays: Any) -> Any:
    """Arrays marked as varying over the manual mesh axes of x, as the carry of a loop under shard_map has to be."""
    of = lambda a: jax.typeof(a).manual_axis_type.varying
    axes = frozenset().union(*map(of, jax.tree.leaves(x)))
    missing = lambda a: tuple(sorted(axes - of(a)))
    return jax.tree.map(lambda a: lax.pcast(a, missing(a), to="varying") if missing(a) else a, arrays)


# --- Configs ---------------------------------------------------------------------------------------------------------


def heuristic(spec: FlashAttentionSpec, operands: Operands, target: Target) -> KernelConfig:
    """Square tiles, at most as wide as the window, whose logits of all heads fit the cache of a CPU, or else memory."""
    b, _, h, _ = operands.q.shape
    b = 1 if spec.batch_invariant else b
    logits, largest = (2**20, 512) if target.platform == "cpu" else (2**26, 1024)
    block = math.isqrt(logits // max(1, b * h))
    left, right = band(spec.causal, spec.window)
    if None not in (left, right):
        block = min(block, left + right + 1)
    block = min(largest, max(128, 2 ** math.floor(math.log2(max(1, block)))))
    return KernelConfig(block_q=block, block_k=block)


def space(spec: FlashAttentionSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    """The heuristic config, and square tiles of 128 to 1024 up to the smallest one that holds all tokens.

    On a CPU only the heuristic one: compiling and timing the others takes longer than they could save.
    """
    chosen = heuristic(spec, operands, target)
    if target.platform == "cpu":
        return [chosen]
    longest = max(operands.q.shape[1], operands.k.shape[1])
    squares = (KernelConfig(block_q=n, block_k=n) for n in (128, 256, 512, 1024) if n < 2 * longest)
    return list(dict.fromkeys([chosen, *squares]))
