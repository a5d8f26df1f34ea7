"""What the XLA implementations of attention share: the layout, who sees whom, products, and the loop over tiles.

Layout inside: a query head is member r of group g, and shares the key and value head of its group, so

    q [b,g,r,s,d]     k [b,g,t,d]     v [b,g,t,e]     logits, bias, mask [b,g,r,s,t]     a number per row [b,g,r,s,1]

where an axis along which an array is broadcast stays of size 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.xla_utils.philox import philox_4x32


class Tokens(NamedTuple):
    """What mask and dropout ask of the queries, int32 [b?,1,1,s,1], or of the keys, [b?,1,1,1,t]; None if they do not.

    index: the place in its own sequence. position: the place on the axis of the keys, i' = i + K − S for a query.
    sequence: its number in cu_seqlens. segment: its segment id. A negative sequence or segment is padding.
    """

    index: Array | None = None
    position: Array | None = None
    sequence: Array | None = None
    segment: Array | None = None


class Folded(NamedTuple):
    """The operands in the layout of this module, and the tokens of rows and columns; None where absent."""

    q: Any
    k: Any
    v: Any
    bias: Any
    mask: Any
    sinks: Any
    softmax_scale: Any
    dropout: Any
    rows: Tokens = Tokens()
    columns: Tokens = Tokens()


def folded(operands: Operands, spec: FlashAttentionSpec) -> Folded:
    """The operands in the layout of this module, with their tokens."""
    rows, columns = tokens(operands, spec)
    return fold(operands, operands.k.shape[2])._replace(rows=rows, columns=columns)


def fold(operands: Operands, groups: int) -> Folded:
    """The operands, or their tangents, in the layout of this module; without tokens."""
    q, k, v, bias, mask, _, _, sinks, softmax_scale, _, _, dropout = operands
    return Folded(
        None if q is None else fold_rows(q, groups),
        *(None if x is None else x.transpose(0, 2, 1, 3) for x in (k, v)),
        *(None if x is None else fold_heads(x, groups) for x in (bias, mask)),
        None if sinks is None else lax.expand_dims(fold_heads(sinks, groups), (3,)),
        None if softmax_scale is None else lax.expand_dims(fold_heads(softmax_scale, groups), (3, 4)),
        None if dropout is None else fold_heads(dropout, groups),
    )


def fold_heads(x: Array, groups: int) -> Array:
    """[b,h,…] -> [b,g,r,…], and [b,1,…] -> [b,1,1,…]."""
    heads = x.shape[1]
    return x.reshape(x.shape[0], *((1, 1) if heads == 1 else (groups, heads // groups)), *x.shape[2:])


def fold_rows(x: Array, groups: int) -> Array:
    """[b,s,h,e] -> [b,g,r,s,e]."""
    b, s, h, e = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b, groups, h // groups, s, e)


def unfold_rows(x: Array) -> Array:
    """[b,g,r,s,e] -> [b,s,h,e]."""
    b, g, r, s, e = x.shape
    return x.reshape(b, g * r, s, e).transpose(0, 2, 1, 3)


def unfold_columns(x: Array) -> Array:
    """[b,g,d,t] -> [b,t,g,d]."""
    return x.transpose(0, 3, 1, 2)


# --- Who sees whom ---------------------------------------------------------------------------------------------------


def bounds(spec: FlashAttentionSpec) -> tuple[int | None, int | None]:
    """(left, right) of i' − left ≤ j ≤ i' + right: the window, cut at the diagonal where causal."""
    left, right = spec.window
    return left, (0 if right is None else min(right, 0)) if spec.causal else right


def tokens(operands: Operands, spec: FlashAttentionSpec) -> tuple[Tokens, Tokens]:
    """The rows and the columns of the logits of a call, dense or packed."""
    s, t = operands.q.shape[1], operands.k.shape[1]
    i, j = lax.iota(jnp.int32, s)[None], lax.iota(jnp.int32, t)[None]
    n_i = n_j = None
    if operands.cu_seqlens_q is not None:
        (i, n_i, length_i), (j, n_j, length_j) = _split(i, operands.cu_seqlens_q), _split(j, operands.cu_seqlens_k)
        position = i + jnp.take_along_axis(length_j - length_i, jnp.maximum(n_i, 0), axis=1)
    else:
        position = i + (t - s)
        left, right = bounds(spec)
        first, last = (0 if left is None else t - s - left), t - 1 + min(0, right or 0)
        if first > 0 or last < t - 1:  # keys beyond every query's window are padding
            n_i, n_j = jnp.zeros_like(i), jnp.where((j >= first) & (j <= last), 0, -1)
    drops, is_bounded = operands.dropout is not None, bounds(spec) != (None, None)
    rows = Tokens(i if drops else None, position if is_bounded else None, n_i, operands.q_segment_ids)
    columns = Tokens(j if drops else None, j if is_bounded else None, n_j, operands.kv_segment_ids)
    as_rows, as_columns = partial(lax.expand_dims, dimensions=(1, 2, 4)), partial(lax.expand_dims, dimensions=(1, 2, 3))
    return jax.tree.map(as_rows, rows), jax.tree.map(as_columns, columns)


def _split(place: Array, cu_seqlens: Array) -> tuple[Array, Array, Array]:
    """For each place of a packed axis its place in its sequence and the number of that (−1: none); all lengths."""
    number = jax.vmap(lambda ends: jnp.searchsorted(ends, place[0], side="right"))(cu_seqlens[:, 1:])
    inside = (place >= cu_seqlens[:, :1]) & (place < cu_seqlens[:, -1:])
    index = place - jnp.take_along_axis(cu_seqlens, number, axis=1)
    return index, jnp.where(inside, number.astype(jnp.int32), -1), cu_seqlens[:, 1:] - cu_seqlens[:, :-1]


def visible(x: Folded, spec: FlashAttentionSpec) -> Array | None:
    """[b?,g?,r?,s?,t?] bool: the logits that count; None where all do."""
    left, right = bounds(spec)
    rules = [] if x.mask is None else [x.mask]
    if x.rows.position is not None:
        distance = x.columns.position - x.rows.position
        rules += [] if left is None else [distance >= -left]
        rules += [] if right is None else [distance <= right]
    for row, column in ((x.rows.sequence, x.columns.sequence), (x.rows.segment, x.columns.segment)):
        rules += [] if row is None else [row == column, column >= 0]
    return reduce(jnp.logical_and, rules) if rules else None


def alive(x: Folded, seen: Array | None) -> tuple[Array, Array] | None:
    """Which rows see something [b?,g?,r?,s?,1], which columns are seen [b?,g?,t?,1]; None where all do and are."""
    if x.mask is None and x.rows.sequence is None and x.rows.segment is None:
        return None  # causal and window leave no column unseen, or `tokens` would have numbered it as padding
    return seen.any(-1, keepdims=True), lax.expand_dims(seen.any((2, 3)), (3,))


def zero_dead(x: Folded, living: tuple[Array, Array] | None) -> Folded:
    """x with q = 0 in rows that see nothing, and k = v = 0 in columns that nothing sees.

    They may be padding that holds NaN, which a weight of zero does not keep out of a product: 0 · NaN = NaN.
    """
    if living is None:
        return x
    rows, columns = living
    zero = lambda kept, a: None if a is None else where(kept, a, 0)
    return x._replace(q=zero(rows, x.q), k=zero(columns, x.k), v=zero(columns, x.v))


def dropped(p: Array, x: Folded, spec: FlashAttentionSpec) -> Array:
    """The weights p [b,g,r,s,t] after dropout: those kept over 1 − rate, the others 0."""
    if x.dropout is None:
        return p
    key0, key1, batch, head = (x.dropout[..., word, None, None] for word in range(4))
    if x.rows.sequence is not None:
        batch = batch + x.rows.sequence.astype(jnp.uint32)
    i, j = x.rows.index.astype(jnp.uint32), x.columns.index.astype(jnp.uint32)
    word = philox_4x32((j, i, batch, head), (key0, key1))[0]
    threshold = min(round(spec.dropout_rate * 2**32), 2**32 - 1)
    return where(word >= np.uint32(threshold), p / (1 - spec.dropout_rate), 0)


def where(condition: Array, x: Array, otherwise: float) -> Array:
    """x, or a number where the condition, broadcast to x, is false; traced faster than `jnp.where`."""
    condition = lax.broadcast_in_dim(condition, x.shape, range(x.ndim))
    return lax.select(condition, x, lax.full_like(x, otherwise))


# --- Products --------------------------------------------------------------------------------------------------------


def statistics_dtype(dtype: Any) -> Any:
    """float32, or float64 where the inputs are. By the table of numpy: that of jax may be set to refuse."""
    return np.promote_types(dtype, np.float32)


def over_features(q: Array, k: Array, dtype: Any = None) -> Array:
    """Σ_d q [b,g,r,s,d] · k [b,g,t,d] -> [b,g,r,s,t]."""
    return _dot(q, k, ((4,), (3,)), dtype)


def over_columns(p: Array, v: Array) -> Array:
    """Σ_t p [b,g,r,s,t] · v [b,g,t,e] -> [b,g,r,s,e]."""
    return _dot(p.astype(v.dtype), v, ((4,), (2,)))


def over_rows(do: Array, p: Array) -> Array:
    """Σ_{r,s} do [b,g,r,s,e] · p [b,g,r,s,t] -> [b,g,e,t]."""
    return _dot(do, p.astype(do.dtype), ((2, 3), (2, 3)))


def _dot(x: Array, y: Array, contracted: tuple, dtype: Any = None) -> Array:
    """In the dtype of statistics unless told; float32 in full on every platform."""
    dtype = dtype or statistics_dtype(x.dtype)
    dimensions = (contracted, ((0, 1), (0, 1)))
    return lax.dot_general(x, y, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)


def sum_to(x: Array, shape: tuple) -> Array:
    """x summed over the axes along which an array of this shape was broadcast."""
    return x.sum([axis for axis, n in enumerate(shape) if n == 1 and x.shape[axis] != 1], keepdims=True)


# --- Tiles -----------------------------------------------------------------------------------------------------------

# Where an array keeps the rows and where the columns of the logits. One without a name here, and an axis of size 1,
# belongs to every tile.
AXES = (
    dict.fromkeys(("q", "o", "m", "l", "lse", "excess", "delta", "dq", "do", "dlse", "rows"), (-2, None))
    | dict.fromkeys(("k", "v"), (None, -2))
    | dict.fromkeys(("dk", "dv", "columns"), (None, -1))
    | dict.fromkeys(("bias", "dbias", "mask"), (-2, -1))
)
Start = tuple[Any, Any]  # row and column of a tile's first logit, uint32: unsigned, they are not looked at for wrapping
ORIGIN = (np.uint32(0), np.uint32(0))


@dataclass(frozen=True)
class Grid:
    """The tiles of the logits that are computed.

    Attributes:
        size: rows and columns of a tile.
        starts: the first row of each tile, and the first column, uint32.
        shape: rows and columns of all the logits, without padding.
        padding: rows and columns appended to make whole tiles.
    """

    size: tuple[int, int]
    starts: tuple[np.ndarray, np.ndarray]
    shape: tuple[int, int]
    padding: tuple[int, int]


def cut(operands: Operands, spec: FlashAttentionSpec, block_q: int, block_k: int) -> tuple[Folded, Grid]:
    """The operands padded to whole tiles, and the tiles that causal and window leave: all of them where packed.

    Blocks are made as equal as possible, so that little is padded: 1000 rows in blocks of at most 512 are 2 · 500.
    """
    s, t = shape = operands.q.shape[1], operands.k.shape[1]
    size = tuple(
        math.ceil(n / math.ceil(n / block)) if n else 1 for n, block in zip(shape, (block_q, block_k), strict=True)
    )
    padding = -s % size[0], -t % size[1]
    starts = _starts(shape, size, bounds(spec) if operands.cu_seqlens_q is None else (None, None))
    x = folded(operands, spec)
    if any(padding) and x.rows.sequence is None:  # a negative sequence tells the padding apart
        rows, columns = jnp.zeros((1, 1, 1, s, 1), jnp.int32), jnp.zeros((1, 1, 1, 1, t), jnp.int32)
        x = x._replace(rows=x.rows._replace(sequence=rows), columns=x.columns._replace(sequence=columns))
    return pad(x, padding), Grid(size, starts, shape, padding)


def _starts(shape: tuple, size: tuple, within: tuple) -> tuple[np.ndarray, np.ndarray]:
    (s, t), (left, right) = shape, within
    row, column = np.meshgrid(np.arange(0, s, size[0]), np.arange(0, t, size[1]), indexing="ij")
    first, last = row + (t - s), np.minimum(row + size[0], s) - 1 + (t - s)
    inside = np.ones(row.shape, bool) if right is None else column <= last + right
    inside &= True if left is None else np.minimum(column + size[1], t) - 1 >= first - left
    return row[inside].astype(np.uint32), column[inside].astype(np.uint32)


def pad(x: Any, amount: tuple[int, int]) -> Any:
    """Arrays named by AXES with rows and columns appended: 0, but −1 for tokens, which makes them padding."""

    def grow(name, a):
        widths = [(0, 0, 0)] * a.ndim
        for axis, side in _tiled_axes(name, a):
            widths[axis] = (0, amount[side], 0)
        return lax.pad(a, np.array(-1 if name in ("rows", "columns") else 0, a.dtype), widths)

    return _map_named(grow, x) if any(amount) else x


def tile(x: Any, start: Start, size: tuple[int, int]) -> Any:
    """The part in a tile of arrays named by AXES."""

    def part(name, a):
        starts, sizes = [np.uint32(0)] * a.ndim, list(a.shape)
        for axis, side in _tiled_axes(name, a):
            starts[axis], sizes[axis] = start[side], size[side]
        return a if tuple(sizes) == a.shape else lax.dynamic_slice(a, starts, sizes)

    return _map_named(part, x)


def put(totals: Any, parts: Any, start: Start) -> Any:
    """The totals with a tile's part of them replaced."""

    def replaced(name, total, part):
        starts = [np.uint32(0)] * total.ndim
        for axis, side in _tiled_axes(name, total):
            starts[axis] = start[side]
        return part if part.shape == total.shape else lax.dynamic_update_slice(total, part, starts)

    return _map_named(replaced, totals, parts)


def _map_named(f: Callable[..., Array], *trees: Any) -> Any:
    """f(name, *arrays) for the arrays under each name of dicts, or of NamedTuples."""
    first, *others = trees if isinstance(trees[0], dict) else [tree._asdict() for tree in trees]
    mapped = {
        name: jax.tree.map(partial(f, name), value, *(other[name] for other in others)) for name, value in first.items()
    }
    return mapped if isinstance(trees[0], dict) else type(trees[0])(**mapped)


def _tiled_axes(name: str, x: Array) -> list[tuple[int, int]]:
    """(axis, 0 for rows or 1 for columns) of the axes that are cut."""
    sides = enumerate(AXES.get(name, ()))
    return [(axis, side) for side, axis in sides if axis is not None and x.shape[axis] > 1]


def sweep(of_tile: Callable, x: tuple, add: Callable, totals: Any, grid: Grid) -> Any:
    """of_tile(*tile of x) of every tile, added up by add(total, part), each in its own part of the totals.

    Totals, and so the parts, are named by AXES and hold the padding. Derivatives keep nothing of a tile but where it
    starts: it is computed again.
    """
    tiles = len(grid.starts[0])
    if tiles == 0:
        return totals
    if tiles == 1 and grid.size == grid.shape:
        return of_tile(*x)

    @partial(jax.checkpoint, prevent_cse=False)
    def part(x, start):
        return of_tile(*(tile(a, start, grid.size) for a in x))

    def step(totals, start):
        return put(totals, add(tile(totals, start, grid.size), part(x, start)), start), None

    return lax.scan(step, varying_like(x, totals), grid.starts)[0]


def trim(x: Any, grid: Grid) -> Any:
    """Arrays named by AXES without the padding."""
    return tile(x, ORIGIN, grid.shape)


def varying_like(x: Any, constants: Any) -> Any:
    """Constants that vary over the manual mesh axes that x varies over: under shard_map, what a loop carries must."""
    axes = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(x)))
    return jax.tree.map(lambda a: lax.pcast(a, tuple(axes), to="varying"), constants) if axes else constants
