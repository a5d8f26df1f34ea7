"""Common parts of the native sparse attention operations: their checks, and attention to means of complete blocks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.export import is_symbolic_dim
from jax.sharding import NamedSharding, PartitionSpec

from ...errors import value_error
from ...primitives._batching import reshape_axes
from ...primitives._sharding import explicit_axes
from ...xla_utils.sequence_blocks import ended_blocks, places, rows_by_ended_blocks
from ._arguments import array, int32, require_cuts, require_dtype, require_rank, require_same_dtype, size_of

# The largest block that models have: up to it, a block may have more tokens than there are keys.
LARGEST_BLOCK = 128
# Of rows of queries and of mean keys, so that kernels that copy by TMA take them.
MULTIPLE = 8

# --- Checks ----------------------------------------------------------------------------------------------------------


def check_heads(operation: str, q: Any, k: Any) -> None:
    """Raises unless q [b,s,h,d] and k [b,t,g,d] have one float dtype and h is a multiple of g."""
    both = dict(q=q, k=k)
    require_rank(operation, 4, "batch, length, heads, features", **both)
    require_dtype(operation, np.floating, "a float type", **both)
    require_same_dtype(operation, **both)
    for name, x in both.items():
        if 0 in x.shape[2:]:
            rule = f"{name} has {x.shape[2]} heads of {x.shape[3]} features; neither may be 0"
            raise value_error(operation, rule, **both)
    for of, axis in (("batch", 0), ("features", 3)):
        if k.shape[axis] != q.shape[axis]:
            rule = f"k has {of} {k.shape[axis]} but q has {q.shape[axis]}; they must be equal"
            raise value_error(operation, rule, **both)
    if q.shape[2] % k.shape[2]:
        rule = "query heads must be a multiple of key/value heads"
        raise value_error(operation, f"k has {k.shape[2]} heads but q has {q.shape[2]}; {rule}", **both)


def check_values(operation: str, q: Any, k: Any, v: Any) -> None:
    """Raises unless v has q's dtype, and the batch, length and heads of k."""
    if v.dtype != q.dtype or len(v.shape) != 4 or v.shape[:3] != k.shape[:3] or v.shape[3] == 0:
        rule = f"v must be {q.dtype} of {list(k.shape[:3])} and features, as k is"
        raise value_error(operation, rule, q=q, k=k, v=v)


def cuts_of(operation: str, cu_seqlens: Any, q: Any, k: Any) -> Array | None:
    """cu_seqlens as [1, n + 1] int32; None if not given."""
    if cu_seqlens is None:
        return None
    cu_seqlens = array(operation, "cu_seqlens", cu_seqlens)
    require_cuts(operation, cu_seqlens=cu_seqlens)
    if q.shape[0] != 1:
        rule = "it must be 1 since cu_seqlens divides its tokens into sequences"
        raise value_error(operation, f"q has batch {q.shape[0]}; {rule}", q=q)
    if q.shape[1] != k.shape[1]:
        rule = "they must be equal since cu_seqlens divides both"
        raise value_error(operation, f"k has length {k.shape[1]} but q has {q.shape[1]}; {rule}", q=q, k=k)
    return int32(cu_seqlens)[None]


def gates_of(operation: str, q: Any, **given: Any) -> dict[str, Any]:
    """The given gates, which must be a number for each query and head; None for those that are not given."""
    gates = {name: None if x is None else array(operation, name, x) for name, x in given.items()}
    for name, x in gates.items():
        require_dtype(operation, np.floating, "a float type", **{name: x})
        if x is not None and x.shape != q.shape[:-1]:
            rule = f"{name} must be {list(q.shape[:-1])}, a number for each query and head"
            raise value_error(operation, rule, q=q, **{name: x})
    return gates


def block_size_of(operation: str, block_size: Any, k: Any) -> int:
    """The number of tokens in a block; of larger ones than all keys a power of two, of which kernels take multiples.

    The first block has all keys then, and is not complete, as with any larger number.
    """
    size, keys = size_of(operation, "block_size", block_size), k.shape[1]
    return size if is_symbolic_dim(keys) else min(size, max(LARGEST_BLOCK, 1 << keys.bit_length()))


# --- The compressed branch -------------------------------------------------------------------------------------------


def compressed(
    attend: Callable[[Array, Array, Array, Array | None, Array | None], Array],
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens: Array | None,
    size: int,
) -> Array:
    """Attention of each query to the mean keys and values of the blocks that end at or before it.

    Queries are arranged in rows of `size`; all queries of row m see the same m blocks, those before block m. This is
    causal attention of rows to blocks, with one row more than blocks, mapped by `jax.vmap` over the places in a row.
    Rows are added before the first and after the last, and blocks after the last, up to a multiple of MULTIPLE.

    Args:
        attend: (q, k, v, cu_seqlens_q, cu_seqlens_k) → o, causal.
    """
    if k.shape[1] // size == 0 or q.shape[1] == 0:
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    if cu_seqlens is not None:
        return _compressed_packed(attend, q, k, v, cu_seqlens[0], size)
    (length, keys), blocks = (q.shape[1], k.shape[1]), k.shape[1] // size
    means = [_mean_of_rows(_in_rows(x[:, : blocks * size], size)) for x in (k, v)]
    beyond = -blocks % MULTIPLE
    means = [jnp.pad(x, ((0, 0), (0, beyond), (0, 0), (0, 0))) for x in means]
    count = blocks - (keys - length + 1) // size + 1 + beyond
    first = -count % MULTIPLE
    before = first * size + (keys - length + 1) % size
    count += first
    behind = count * size - before - length
    rows = _in_rows(jnp.pad(q, ((0, 0), (before, behind), (0, 0), (0, 0))), size)
    o = jax.vmap(lambda q: attend(q, *means, None, None), in_axes=2, out_axes=2)(rows)
    return reshape_axes(o, 1, 2, (count * size,))[:, before : before + length]


def _compressed_packed(attend, q, k, v, cuts, size):
    tokens = q.shape[1]
    blocks, rows = ended_blocks(cuts, tokens, size), rows_by_ended_blocks(cuts, tokens, size)
    means = [_mean_of_rows(_taken(x, blocks.tokens)) for x in (k, v)]
    of_rows = lambda q: attend(q[0], *(x[0] for x in means), rows.before, blocks.before)[None]
    o = jax.vmap(of_rows, in_axes=2, out_axes=2)(_taken(q, rows.tokens))
    o = reshape_axes(o, 1, 2, (o.shape[1] * size,))
    place = places(cuts, tokens, tokens)
    at = rows.before[place.sequence] * size + place.stop
    return _taken(o, jnp.where(place.stop > 0, at, o.shape[1] + jnp.arange(tokens, dtype=jnp.int32)))


def _in_rows(x: Array, size: int) -> Array:
    """x [b, rows · size, …] reshaped to [b, rows, size, …]."""
    return reshape_axes(x, 1, 1, (x.shape[1] // size, size))


def _mean_of_rows(x: Array) -> Array:
    """The mean over each row: [b, rows, size, …] → [b, rows, …], summed in the dtype of statistics."""
    return x.mean(2, dtype=np.promote_types(x.dtype, np.float32)).astype(x.dtype)


def _taken(x: Array, tokens: Array) -> Array:
    """x[:, tokens], with 0 for indices out of range. Indices in range are distinct."""
    aval, sharding = jax.typeof(x), None
    spec = tuple(aval.sharding.spec) if explicit_axes(aval) else ()
    if any(entry is not None for entry in spec):
        spec += (None,) * (x.ndim - len(spec))
        sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(spec[0], *[None] * tokens.ndim, *spec[2:]))
    return x.at[:, tokens].get(mode="fill", fill_value=0, unique_indices=True, out_sharding=sharding)
