"""What the XLA implementations of attention share: heads folded into groups, who sees whom, and the loop over tiles.

Layout inside: a query head is member r of group g, and shares the key and value head of its group, so

    q [b,g,r,s,d]    k [b,g,t,d]    v [b,g,t,e]    logits, bias, mask [b,g,r,s,t]    statistics of a row [b,g,r,s]

where an axis along which bias, mask, sinks or scale are broadcast stays of size 1.
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.xla_utils.philox import philox_4x32


class Tokens(NamedTuple):
    """What mask and dropout ask of the queries (the rows of the logits) or of the keys (the columns); [b?,n] int32.

    index: the place in its own sequence. position: the place on the axis of the keys, i' = i + K − S for a query.
    sequence: its number in cu_seqlens. segment: its segment id. A negative sequence or segment is padding.
    """

    index: Array
    position: Array
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
    rows: Tokens | None = None
    columns: Tokens | None = None


def fold(operands: Operands, groups: int) -> Folded:
    """The operands, or their tangents, in the layout of this module; without tokens."""
    q, k, v, bias, mask, _, _, sinks, softmax_scale, _, _, dropout = operands
    return Folded(
        None if q is None else fold_rows(q, groups),
        *(None if x is None else x.transpose(0, 2, 1, 3) for x in (k, v)),
        *(fold_heads(x, groups) for x in (bias, mask, sinks)),
        None if softmax_scale is None else fold_heads(softmax_scale, groups)[..., None, None],
        fold_heads(dropout, groups),
    )


def fold_heads(x: Array | None, groups: int) -> Array | None:
    """[b,h,…] -> [b,g,r,…], and [b,1,…] -> [b,1,1,…]."""
    if x is None:
        return None
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


# --- Who sees whom ---------------------------------------------------------------------------------------------------


def tokens(operands: Operands) -> tuple[Tokens, Tokens]:
    """The rows and the columns of the logits of a call, dense or packed."""
    s, t = operands.q.shape[1], operands.k.shape[1]
    i, j = lax.iota(jnp.int32, s)[None], lax.iota(jnp.int32, t)[None]
    if operands.cu_seqlens_q is None:
        rows, columns = Tokens(i, i + (t - s)), Tokens(j, j)
    else:
        (i, n_q, length_q), (j, n_k, length_k) = _split(i, operands.cu_seqlens_q), _split(j, operands.cu_seqlens_k)
        shift = jnp.take_along_axis(length_k - length_q, jnp.maximum(n_q, 0), axis=1)
        rows, columns = Tokens(i, i + shift, n_q), Tokens(j, j, n_k)
    return rows._replace(segment=operands.q_segment_ids), columns._replace(segment=operands.kv_segment_ids)


def _split(place: Array, cu_seqlens: Array) -> tuple[Array, Array, Array]:
    """For each place of a packed axis its place in its sequence and the number of that (−1: none); all lengths."""
    number = jax.vmap(lambda ends: jnp.searchsorted(ends, place[0], side="right"))(cu_seqlens[:, 1:])
    inside = (place >= cu_seqlens[:, :1]) & (place < cu_seqlens[:, -1:])
    index = place - jnp.take_along_axis(cu_seqlens, number, axis=1)
    return index, jnp.where(inside, number.astype(jnp.int32), -1), cu_seqlens[:, 1:] - cu_seqlens[:, :-1]


def bounds(spec: FlashAttentionSpec) -> tuple[int | None, int | None]:
    """(left, right) of i' − left ≤ j ≤ i' + right: the window, cut at the diagonal where causal."""
    left, right = spec.window
    return left, (0 if right is None else min(right, 0)) if spec.causal else right


def visible(x: Folded, spec: FlashAttentionSpec) -> Array | None:
    """[b?,g?,r?,s?,t?] bool: the logits that count; None where all do."""
    left, right = bounds(spec)
    distance = x.columns.position[:, None, :] - x.rows.position[:, :, None]
    rules = [] if left is None else [distance >= -left]
    rules += [] if right is None else [distance <= right]
    for row, column in ((x.rows.sequence, x.columns.sequence), (x.rows.segment, x.columns.segment)):
        if row is not None:
            rules.append((row[:, :, None] == column[:, None, :]) & (column >= 0)[:, None, :])
    rules = [rule[:, None, None] for rule in rules] + ([] if x.mask is None else [x.mask])
    return reduce(jnp.logical_and, rules) if rules else None


def zero_unseen(x: Folded, seen: Array | None) -> Folded:
    """x with q = 0 in rows that see nothing, and k = v = 0 in columns that nothing sees.

    They may be padding that holds NaN, which a weight of zero does not keep out of a product: 0 · NaN = NaN.
    """
    if seen is None:
        return x
    sees, is_seen = seen.any(-1)[..., None], seen.any((2, 3))[..., None]
    zero = lambda where, a: None if a is None else jnp.where(where, a, jnp.zeros((), a.dtype))
    return x._replace(q=zero(sees, x.q), k=zero(is_seen, x.k), v=zero(is_seen, x.v))


def dropped(p: Array, x: Folded, spec: FlashAttentionSpec) -> Array:
    """The weights p [b,g,r,s,t] after dropout: those kept over 1 − rate, the others 0."""
    if x.dropout is None:
        return p
    key0, key1, batch, head = (x.dropout[..., word, None, None] for word in range(4))
    i, j = x.rows.index[:, None, None, :, None], x.columns.index[:, None, None, None, :]
    if x.rows.sequence is not None:
        batch = batch + x.rows.sequence[:, None, None, :, None].astype(jnp.uint32)
    word = philox_4x32((j.astype(jnp.uint32), i.astype(jnp.uint32), batch, head), (key0, key1))[0]
    return jnp.where(word >= np.uint32(round(spec.dropout_rate * 2**32)), p / (1 - spec.dropout_rate), 0)


# --- Products --------------------------------------------------------------------------------------------------------


def statistics_dtype(dtype: Any) -> Any:
    """float32, or float64 where the inputs are. By the table of numpy: that of jax may be set to refuse."""
    return np.promote_types(dtype, np.float32)


def over_features(q: Array, k: Array) -> Array:
    """Σ_d q [b,g,r,s,d] · k [b,g,t,d] -> [b,g,r,s,t]."""
    return _dot(q, k, ((4,), (3,)))


def over_columns(p: Array, v: Array) -> Array:
    """Σ_t p [b,g,r,s,t] · v [b,g,t,e] -> [b,g,r,s,e]."""
    return _dot(p.astype(v.dtype), v, ((4,), (2,)))


def over_rows(do: Array, p: Array) -> Array:
    """Σ_{r,s} do [b,g,r,s,e] · p [b,g,r,s,t] -> [b,g,e,t]."""
    return _dot(do, p.astype(do.dtype), ((2, 3), (2, 3)))


def _dot(x: Array, y: Array, contracted: tuple) -> Array:
    dimensions = (contracted, ((0, 1), (0, 1)))
    dtype = statistics_dtype(x.dtype)
    return lax.dot_general(x, y, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)


def sum_to(x: Array, shape: tuple) -> Array:
    """x summed over the axes along which an array of this shape was broadcast."""
    return x.sum([axis for axis, n in enumerate(shape) if n == 1 and x.shape[axis] != 1], keepdims=True)


# --- Tiles -----------------------------------------------------------------------------------------------------------

# Where an array keeps the rows and where the columns of the logits; others, and axes of size 1, belong to every tile.
AXES = (
    dict.fromkeys(("q", "dq", "o", "do"), (-2, None))
    | dict.fromkeys(("rows", "m", "l", "lse", "dlse", "delta"), (-1, None))
    | dict.fromkeys(("k", "v"), (None, -2))
    | dict.fromkeys(("columns", "dk", "dv"), (None, -1))
    | dict.fromkeys(("bias", "dbias", "mask"), (-2, -1))
)
Start = tuple[Any, Any]  # row and column of a tile's first logit, int32, traced in a loop
ORIGIN = (np.int32(0), np.int32(0))


class Grid(NamedTuple):
    """The size of a tile, rows by columns, and where the tiles that are computed start, [n,2] int32."""

    size: tuple[int, int]
    starts: np.ndarray


def cut(x: Folded, spec: FlashAttentionSpec, block_q: int, block_k: int) -> tuple[Folded, Grid]:
    """The operands padded to whole blocks, and the tiles that causal and window leave: all of them where packed.

    Blocks are made as equal as possible, so that little is padded: 1000 rows in blocks of at most 512 are 2 · 500.
    """
    s, t = x.q.shape[-2], x.k.shape[-2]
    size = tuple(math.ceil(n / math.ceil(n / block)) if n else 1 for n, block in ((s, block_q), (t, block_k)))
    row, column = np.meshgrid(*(np.arange(0, n, block) for n, block in zip((s, t), size, strict=True)), indexing="ij")
    first, last = row + (t - s), np.minimum(row + size[0], s) - 1 + (t - s)
    left, right = bounds(spec) if x.rows.sequence is None else (None, None)
    inside = np.ones(row.shape, bool) if right is None else column <= last + right
    inside &= True if left is None else np.minimum(column + size[1], t) - 1 >= first - left
    amount = -s % size[0], -t % size[1]
    if any(amount) and x.rows.sequence is None:  # a negative sequence tells the padding apart
        rows, columns = (side._replace(sequence=jnp.zeros_like(side.index)) for side in (x.rows, x.columns))
        x = x._replace(rows=rows, columns=columns)
    return pad(x, amount), Grid(size, np.stack([row[inside], column[inside]], axis=1).astype(np.int32))


def pad(x: Any, amount: tuple[int, int]) -> Any:
    """Arrays named by AXES with rows and columns appended: 0, but −1 for tokens, which makes them padding."""

    def grow(name, value, a):
        widths = [(0, 0, 0)] * a.ndim
        for axis, side in _tiled_axes(name, a):
            widths[axis] = (0, amount[side], 0)
        return lax.pad(a, np.array(value, a.dtype), widths)

    return _map_named(lambda name, a: grow(name, -1 if name in ("rows", "columns") else 0, a), x) if any(amount) else x


def tile(x: Any, start: Start, size: tuple[int, int]) -> Any:
    """The part in a tile of arrays named by AXES."""

    def part(name, a):
        starts, sizes = [np.int32(0)] * a.ndim, list(a.shape)
        for axis, side in _tiled_axes(name, a):
            starts[axis], sizes[axis] = start[side], size[side]
        return a if tuple(sizes) == a.shape else lax.dynamic_slice(a, starts, sizes)

    return _map_named(part, x)


def put(totals: Any, parts: Any, start: Start) -> Any:
    """The totals with a tile's part of them replaced."""

    def replaced(name, total, part):
        starts = [np.int32(0)] * total.ndim
        for axis, side in _tiled_axes(name, total):
            starts[axis] = start[side]
        return part if part.shape == total.shape else lax.dynamic_update_slice(total, part, starts)

    return _map_named(replaced, totals, parts)


def _map_named(f: Callable[..., Array], *trees: Any) -> Any:
    """f(name, *arrays) for the arrays under each name of dicts, or of NamedTuples."""
    first, *others = trees if isinstance(trees[0], dict) else [tree._asdict() for tree in trees]
    mapped = {
        name: jax.tree.map(lambda *arrays, name=name: f(name, *arrays), value, *(other[name] for other in others))
        for name, value in first.items()
    }
    return mapped if isinstance(trees[0], dict) else type(trees[0])(**mapped)


def _tiled_axes(name: str, x: Array) -> list[tuple[int, int]]:
    """(axis, 0 for rows or 1 for columns) of the axes that are cut."""
    sides = enumerate(AXES.get(name, ()))
    return [(axis, side) for side, axis in sides if axis is not None and x.shape[axis] > 1]


def sweep(step: Callable[[Any, Start], Any], carry: Any, grid: Grid) -> Any:
    """The carry after a step on every tile; without a loop where there is one."""
    if len(grid.starts) == 1:
        return step(carry, tuple(grid.starts[0]))
    return lax.scan(lambda carry, start: (step(carry, (start[0], start[1])), None), carry, grid.starts)[0]


def accumulate(contribution: Callable, x: tuple, totals: dict[str, Array], grid: Grid) -> dict[str, Array]:
    """totals plus contribution(*tile of x) of every tile, each in its place.

    Derivatives keep nothing per tile either: the contribution is recomputed, and the sum is linear.
    """

    @jax.checkpoint
    def of_tile(x, start):
        return contribution(*(tile(part, start, grid.size) for part in x))

    def step(totals, start):
        parts, old = of_tile(x, start), tile(totals, start, grid.size)
        return put(totals, {name: old[name] + parts[name] for name in totals}, start)

    return sweep(step, totals, grid)


def full(shape: tuple, value: float, dtype: Any, like: Any) -> Array:
    """A constant that varies over the same manual mesh axes as the arrays in `like`: a carry must, under shard_map."""
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(like)))
    x = jnp.full(shape, value, dtype)
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x
