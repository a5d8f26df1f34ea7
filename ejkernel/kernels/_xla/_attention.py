"""The common parts of the XLA implementations of attention: layout, visibility, and products.

A query head is member r of group g, and shares the key and value head of its group. So the layout is

    q [b,g,r,s,d]     k [b,g,t,d]     v [b,g,t,e]     logits, bias, mask [b,g,r,s,t]     a number per row [b,g,r,s,1]

where an axis along which an array is broadcast keeps size 1.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.xla_utils.philox import philox_4x32

from .._visibility import Visibility, visibility_of


class Rows(NamedTuple):
    """The properties of queries on which mask and dropout depend, int32 [b?,1,1,s,1]; None if not needed.

    first, stop, segment: a query sees the keys first ≤ j < stop that have its segment id.
    index, sequence: the position of a query in its sequence, and the number of the sequence.
    In padding all are negative; for tokens of no sequence `sequence` is.
    """

    first: Array | None = None
    stop: Array | None = None
    segment: Array | None = None
    index: Array | None = None
    sequence: Array | None = None


class Columns(NamedTuple):
    """The like properties of keys, [b?,1,1,1,t]; `hidden` is whether band or sequences hide a key from every query."""

    key: Array | None = None
    segment: Array | None = None
    index: Array | None = None
    hidden: Array | None = None


class Folded(NamedTuple):
    """The operands in the layout of this module, None where absent, and the properties of rows and columns."""

    q: Any
    k: Any
    v: Any
    bias: Any
    mask: Any
    sinks: Any
    softmax_scale: Any
    dropout: Any
    rows: Rows = Rows()
    columns: Columns = Columns()


def folded(operands: Operands, spec: FlashAttentionSpec, is_padded: bool = False, groups: int | None = None) -> Folded:
    """The operands in the layout of this module, with rows and columns, whose masks cover padding if `is_padded`.

    `groups` is the number of key heads by default, or a multiple of it: then several groups share a head of the keys.
    """
    rows, columns = _tokens(operands, spec, is_padded)
    return fold(operands, groups or operands.k.shape[2])._replace(rows=rows, columns=columns)


def fold(operands: Operands, groups: int) -> Folded:
    """The operands, or their tangents, in the layout of this module, without rows and columns."""
    q, k, v, bias, mask, _, _, sinks, softmax_scale, _, _, dropout = operands
    return Folded(
        None if q is None else fold_rows(q, groups),
        *(None if x is None else lax.transpose(x, (0, 2, 1, 3)) for x in (k, v)),
        *(None if x is None else fold_heads(x, groups) for x in (bias, mask)),
        None if sinks is None else lax.expand_dims(fold_heads(sinks, groups), (3,)),
        None if softmax_scale is None else lax.expand_dims(fold_heads(softmax_scale, groups), (3, 4)),
        None if dropout is None else fold_heads(dropout, groups),
    )


def fold_heads(x: Array, groups: int) -> Array:
    """[b,h,…] -> [b,g,r,…], and [b,1,…] -> [b,1,1,…]."""
    heads = x.shape[1]
    return lax.reshape(x, (x.shape[0], *((1, 1) if heads == 1 else (groups, heads // groups)), *x.shape[2:]))


def fold_rows(x: Array, groups: int) -> Array:
    """Groups the heads that share a key/value head, [b,s,h,e] -> [b,g,r,s,e]."""
    b, s, h, e = x.shape
    return lax.reshape(lax.transpose(x, (0, 2, 1, 3)), (b, groups, h // groups, s, e))


def unfold_rows(x: Array) -> Array:
    """The inverse of `fold_rows`, [b,g,r,s,e] -> [b,s,h,e]."""
    b, g, r, s, e = x.shape
    return lax.transpose(lax.reshape(x, (b, g * r, s, e)), (0, 2, 1, 3))


def unfold_columns(x: Array, groups: int) -> Array:
    """[b,g,d,t] -> [b,t,groups,d], summed over groups that share a head of the keys."""
    b, g, d, t = x.shape
    if g != groups:
        x = lax.reshape(x, (b, groups, g // groups, d, t)).sum(2)
    return lax.transpose(x, (0, 3, 1, 2))


# --- Visibility ------------------------------------------------------------------------------------------------------


def _tokens(operands: Operands, spec: FlashAttentionSpec, is_padded: bool) -> tuple[Rows, Columns]:
    rows, columns = Rows(segment=operands.q_segment_ids), Columns(segment=operands.kv_segment_ids)
    visibility = visibility_of(operands._replace(q_segment_ids=None, kv_segment_ids=None, mask=None), spec)
    is_packed = visibility.cu_seqlens is not None
    if visibility.is_banded or is_packed or is_padded:
        first, stop = visibility.intervals()
        rows = rows._replace(first=first if visibility.left is not None or is_packed else None, stop=stop)
        columns = columns._replace(key=_iota(visibility.kv_len))
    if visibility.masks_keys:
        columns = columns._replace(hidden=visibility.transposed().fully_masked()[:, 0])
    if is_packed and (operands.dropout is not None or operands.sinks is not None):
        number, is_inside = visibility.sequences()
        rows = rows._replace(sequence=jnp.where(is_inside, number, -1))
    if operands.dropout is not None:
        rows, columns = rows._replace(index=_index(visibility)), columns._replace(index=_index(visibility.transposed()))
    as_rows, as_columns = partial(lax.expand_dims, dimensions=(1, 2, 4)), partial(lax.expand_dims, dimensions=(1, 2, 3))
    return jax.tree.map(as_rows, rows), jax.tree.map(as_columns, columns)


def _index(visibility: Visibility) -> Array:
    """The positions of queries in their sequences."""
    place = _iota(visibility.q_len)
    if visibility.cu_seqlens is None:
        return place
    number, _ = visibility.sequences()
    return place - jnp.take_along_axis(visibility.cu_seqlens[0], number, axis=1)


def _iota(length: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (1, length), 1)


def hides(x: Folded) -> bool:
    """Whether logits, and perhaps all of a row, may be −∞, by a mask or a bias of −∞."""
    return any(a is not None for a in (x.bias, x.mask, x.rows.stop, x.rows.segment))


def visible(x: Folded) -> Array | None:
    """Which logits are not masked, bool [b?,g?,r?,s?,t?]; None if nothing is masked."""
    rows, columns = x.rows, x.columns
    rules = [] if x.mask is None else [x.mask]
    rules += [] if rows.first is None else [rows.first <= columns.key]
    rules += [] if rows.stop is None else [columns.key < rows.stop]
    rules += [] if rows.segment is None else [rows.segment == columns.segment, rows.segment >= 0]
    return reduce(jnp.logical_and, rules) if rules else None


def sinks_of_rows(x: Folded, dtype: Any) -> Array:
    """The sinks of rows [b?,g,r,s?,n]; −∞ for tokens of no sequence, to which sinks do not apply."""
    sinks = x.sinks.astype(dtype)
    return sinks if x.rows.sequence is None else jnp.where(x.rows.sequence >= 0, sinks, -np.inf)


class Living(NamedTuple):
    """The rows [b?,g?,r?,s?,1] and the columns [b?,g?,t?,1] that are not fully masked; None if none may be."""

    rows: Array | None = None
    columns: Array | None = None


def alive(x: Folded, visible_to: Array | None) -> Living:
    """The rows and columns that are not fully masked, from the visible logits."""
    if visible_to is None:
        return Living()
    rows, columns = visible_to.any(-1, keepdims=True), None
    if x.mask is not None or x.rows.segment is not None:
        columns = lax.expand_dims(visible_to.any((2, 3)), (3,))
    elif x.columns.hidden is not None:
        columns = ~lax.expand_dims(x.columns.hidden[:, :, 0, 0], (3,))
    return Living(rows, columns)


def zero_fully_masked(x: Folded, living: Living) -> Folded:
    """x with q = 0 in fully masked rows, and k = v = 0 in fully masked columns.

    These may be padding that holds NaN, which a weight of zero does not keep out of a product: 0 · NaN = NaN.
    """
    q = zero_where_masked(living.rows, x.q)
    return x._replace(q=q, k=zero_where_masked(living.columns, x.k), v=zero_where_masked(living.columns, x.v))


def zero_where_masked(living: Array | None, a: Array | None) -> Array | None:
    """An array over rows or columns, 0 where these are fully masked."""
    return a if a is None or living is None else where(living, a, 0)


def dropped(p: Array, x: Folded, spec: FlashAttentionSpec) -> Array:
    """The weights p [b,g,r,s,t] after dropout: kept ones divided by 1 − rate, the others 0."""
    if x.dropout is None:
        return p
    key0, key1, batch, head, *places = (x.dropout[..., word, None, None] for word in range(8))
    if x.rows.sequence is not None:
        batch = batch + x.rows.sequence.astype(jnp.uint32)
    i = places[0] + places[1] * x.rows.index.astype(jnp.uint32)
    j = places[2] + places[3] * x.columns.index.astype(jnp.uint32)
    word = philox_4x32((j, i, batch, head), (key0, key1))[0]
    threshold = min(round(spec.dropout_rate * 2**32), 2**32 - 1)
    return where(word >= np.uint32(threshold), p / (1 - spec.dropout_rate), 0)


def where(condition: Array, x: Array, otherwise: float) -> Array:
    """x where the condition, broadcast to x, is true, else a number; it is traced faster than `jnp.where`."""
    condition = lax.broadcast_in_dim(condition, x.shape, range(x.ndim))
    return lax.select(condition, x, lax.full_like(x, otherwise))


# --- Products --------------------------------------------------------------------------------------------------------


def statistics_dtype(dtype: Any) -> Any:
    """float32, or float64 for float64; by NumPy's promotion, as that of JAX may be set to strict."""
    return np.promote_types(dtype, np.float32)


def over_features(q: Array, k: Array, dtype: Any = None) -> Array:
    """Σ_d q [b,g,r,s,d] · k [b,g,t,d] -> [b,g,r,s,t]."""
    return _dot(q, k, ((4,), (3,)), dtype)


def over_columns(p: Array, v: Array) -> Array:
    """Σ_t p [b,g,r,s,t] · v [b,g,t,e] -> [b,g,r,s,e]."""
    return _dot(lax.convert_element_type(p, v.dtype), v, ((4,), (2,)))


def over_rows(do: Array, p: Array) -> Array:
    """Σ_{r,s} do [b,g,r,s,e] · p [b,g,r,s,t] -> [b,g,e,t]."""
    return _dot(do, lax.convert_element_type(p, do.dtype), ((2, 3), (2, 3)))


def _dot(x: Array, y: Array, contracted: tuple, dtype: Any = None) -> Array:
    """A product in `dtype`, by default that of statistics; float32 in full precision on every platform."""
    dtype = dtype or statistics_dtype(x.dtype)
    dimensions = (contracted, ((0, 1), (0, 1)))
    return lax.dot_general(x, y, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)


def sum_to(x: Array, shape: tuple) -> Array:
    """x summed over the axes along which an array of this shape was broadcast."""
    return x.sum([axis for axis, n in enumerate(shape) if n == 1 and x.shape[axis] != 1], keepdims=True)


def over_row(reduction: Callable, x: Array) -> Array:
    """`lax.reduce_max` or `lax.reduce_sum` over the columns, which stay as an axis of size 1."""
    return lax.expand_dims(reduction(x, (x.ndim - 1,)), (x.ndim - 1,))


def scaled(x: Array, factor: float) -> Array:
    """x · factor, in the dtype of x."""
    return lax.mul(x, np.array(factor, x.dtype))
