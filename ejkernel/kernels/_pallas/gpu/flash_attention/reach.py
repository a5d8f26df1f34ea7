"""Who sees whom where arrays say so, in packed sequences and by segment ids: found before a kernel runs.

A kernel holds tiles of queries (or of keys) and visits blocks of the others; rows are of what it holds, columns of what
it visits. In a packed call a row sees one range of columns, in which causality and the window are contained; in a call
with segments those columns that have its id, if the band of causality and window holds them as well.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._segments import spans
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands

from .problem import Problem, Visits, at_least_one, visits

# Ids of queries and of keys that are padding, and so see nothing of each other.
BLIND, UNSEEN = -1, -2


class Reach(NamedTuple):
    """What a tile visits and its rows see, int32; `ranges` in packed calls, `ids` in those with segments.

    bounds [b, tiles, 4]: the `Visits` of each tile. ranges: low and high, a row sees columns in [low, high). ids: of
    rows and of columns. Arrays of rows [b, rows] and columns [b, columns] go on to the end of the last tile or block.
    """

    bounds: Array
    ranges: tuple[Array, Array] | None
    ids: tuple[Array, Array] | None

    def visits(self, tile: Array, batch: Array) -> Visits:
        """In a kernel, where the arrays are refs: what a tile visits."""
        return Visits(*(self.bounds[self._row(batch), tile, n] for n in range(len(Visits._fields))))

    def _row(self, batch: Array) -> Array | int:
        return batch if self.bounds.shape[0] > 1 else 0


def reach_of(
    operands: Operands, spec: FlashAttentionSpec, problem: Problem, held: int, step: int, of_keys: bool = False
) -> Reach | None:
    """Of tiles of `held` queries and blocks of `step` keys, or the other way round; None where there are no arrays."""
    if problem.packed:
        low, high = (_whole(x, held, 0) for x in _ranges(operands, spec, of_keys))
        blocks = -(-(problem.S if of_keys else problem.K) // step)
        return Reach(_bounds_of_ranges(low, high, held, step, blocks), (low, high), None)
    if problem.segmented:
        return _reach_of_segments(operands, problem, held, step, of_keys)
    return None


def without_unseen(operands: Operands, spec: FlashAttentionSpec, problem: Problem, *of_keys: Array | None) -> tuple:
    """Arrays [b, K, G, …] with zeros where no query sees a key, whose NaN a weight of 0 would not undo."""
    if not (problem.packed or problem.segmented):
        return of_keys
    return _where(_seen(operands, spec, problem, True), of_keys)


def without_blind(operands: Operands, spec: FlashAttentionSpec, problem: Problem, *of_queries: Array) -> tuple:
    """Arrays [b, S, H, …] with zeros where a query sees no key."""
    if not (problem.packed or problem.segmented or problem.blind):
        return of_queries
    return _where(_seen(operands, spec, problem, False), of_queries)


def _where(seen: Array, arrays: tuple) -> tuple:
    return tuple(None if x is None else jnp.where(seen[:, :, None, None], x, jnp.zeros((), x.dtype)) for x in arrays)


def _seen(operands: Operands, spec: FlashAttentionSpec, problem: Problem, of_keys: bool) -> Array:
    """Whether a key is seen by a query, or a query sees a key: bool [b, tokens]."""
    if problem.packed:
        low, high = _ranges(operands, spec, of_keys)
        return low < high
    i, j = (jnp.arange(n, dtype=jnp.int32) for n in (problem.S, problem.K))
    if not problem.segmented:  # queries of a band: what it hides of the keys is none of these kernels'
        return (i + problem.high >= 0)[None]
    q_ids, kv_ids = _ids(operands)
    ok = q_ids[:, :, None] == kv_ids[:, None, :]
    if problem.low is not None:
        ok &= (i + problem.low)[:, None] <= j
    if problem.high is not None:
        ok &= (i + problem.high)[:, None] >= j
    return ok.any(1 if of_keys else 2)


# ---- Packed sequences


def _ranges(operands: Operands, spec: FlashAttentionSpec, of_keys: bool) -> tuple[Array, Array]:
    """The keys [low, high) that each query sees, or the queries that see each key: int32 [b, tokens]; else [0, 0)."""
    cu, other_cu = jnp.broadcast_arrays(operands.cu_seqlens_q, operands.cu_seqlens_k)
    tokens, (left, right) = operands.q.shape[1], spec.window
    if spec.causal:
        right = 0 if right is None else min(right, 0)
    if of_keys:
        cu, other_cu, tokens, left, right = other_cu, cu, operands.k.shape[1], right, left
    token = jnp.arange(tokens, dtype=jnp.int32)
    sequence = (cu[:, 1:, None] <= token).sum(1, dtype=jnp.int32)
    inside = (sequence < cu.shape[1] - 1) & (token >= cu[:, :1])
    of_sequence = lambda x: jnp.take_along_axis(x, jnp.minimum(sequence, cu.shape[1] - 2), 1)
    low, high = of_sequence(other_cu[:, :-1]), of_sequence(other_cu[:, 1:])
    partner = token - of_sequence(cu[:, 1:]) + high  # bottom-right aligned: the last of both are partners
    if right is not None:
        high = jnp.minimum(high, partner + right + 1)
    if left is not None:
        low = jnp.maximum(low, partner - left)
    some = inside & (low < high)
    return jnp.where(some, low, 0), jnp.where(some, high, 0)


def _bounds_of_ranges(low: Array, high: Array, held: int, step: int, blocks: int) -> Array:
    """Rows that see nothing neither widen what a tile visits nor leave anything whole."""
    low, high = (x.reshape(x.shape[0], -1, held) for x in (low, high))
    first = jnp.where(low < high, low, blocks * step)
    found = first.min(2) // step, -(-high.max(2) // step), -(-first.max(2) // step), high.min(2) // step
    return jnp.stack(at_least_one(Visits(*found), blocks), -1)


# ---- Segments


def _reach_of_segments(operands: Operands, problem: Problem, held: int, step: int, of_keys: bool) -> Reach:
    (rows, columns), padding = ((x[::-1] if of_keys else x) for x in (_ids(operands), (BLIND, UNSEEN)))
    tiles, blocks = -(-rows.shape[1] // held), -(-columns.shape[1] // step)
    low, high = problem.band(of_keys)
    of_band = jax.vmap(lambda first: Visits(*visits(first, held, low, high, columns.shape[1], step)))
    band = of_band(jnp.arange(tiles, dtype=jnp.int32) * held)
    begin, end, first_whole, last_whole = jnp.moveaxis(spans(operands, held, step, of_keys), -1, 0) // step
    both = Visits(
        jnp.maximum(begin, band.begin),
        jnp.minimum(end, band.end),
        jnp.maximum(first_whole, band.first_whole),
        jnp.minimum(last_whole, band.last_whole),
    )
    ids = _whole(rows, held, padding[0]), _whole(columns, step, padding[1])
    return Reach(jnp.stack(at_least_one(both, blocks), -1), None, ids)


def _ids(operands: Operands) -> tuple[Array, Array]:
    """Of queries and keys, where the same ones see each other."""
    q_ids, kv_ids = operands.q_segment_ids, operands.kv_segment_ids
    return jnp.where(q_ids < 0, BLIND, q_ids), jnp.where(kv_ids < 0, UNSEEN, kv_ids)


def _whole(x: Array, size: int, padding: int) -> Array:
    """[b, n] up to a multiple of `size`."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=padding)
