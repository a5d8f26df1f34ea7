"""The forward kernel: an online softmax over the slots that the queries of a tile list, as in flash attention.

Each row of a tile has a maximum m, denominator l and accumulator a over the slots so far. Logits s update them to

    m' = max(m, max s);   l' = l·exp(m − m') + Σ exp(s − m');   a' = a·exp(m − m') + Σ exp(s − m')·v

and in the end o = a / l, lse = m + log l.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from ..flash_attention.launch import vmem
from ..flash_attention.tiles import MASKED, contract
from .configs import bytes_of, entries_of
from .problem import Pairs, Problem, in_slots, in_tiles, out_of_tiles, pairs_of, problem_of, rows_out_of_tiles
from .records import Record, Records, for_chunks, over_records, records_of
from .tiles import entries_at, keys_of, logits, visible_of


class Softmax(NamedTuple):
    """The running m and l [1, rows] and a [features, rows], in float32."""

    maximum: Any
    total: Any
    weighted: Any


def native_sparse_attention(
    *operands: jax.Array | None, spec: NativeSparseAttentionSpec, config: KernelConfig
) -> Outputs:
    """o, the attention to the keys of listed blocks, and lse, the logsumexp of each row of logits."""
    x = Operands(*operands)
    problem = problem_of(x, spec, config)
    pairs = pairs_of(x, problem)
    q, features = in_tiles(jnp.where(pairs.sees[..., None], x.q, 0), problem), x.v.shape[3]
    slots = [in_slots(a, x, problem) for a in (x.k, x.v)]
    row = vmem((1, problem.rows))
    o, lse = over_records(
        partial(_kernel, problem=problem),
        "native_sparse_attention",
        records_of_tiles(pairs, slots, problem),
        (q, pairs.limit),
        slots,
        (
            jax.ShapeDtypeStruct((*q.shape[:2], features), x.q.dtype),
            jax.ShapeDtypeStruct((q.shape[0], 1, problem.rows), jnp.float32),
        ),
        Softmax(row, row, vmem((features, problem.rows))),
    )
    return Outputs(out_of_tiles(o, problem), rows_out_of_tiles(lse, problem))


def records_of_tiles(pairs: Pairs, slots: list[jax.Array], problem: Problem) -> Records:
    """The records of the slots of each tile; a kernel copies each of the arrays `slots` for them."""
    majors, entries = pairs.count.shape[0], pairs.slot.shape[0] // pairs.count.shape[0]
    of_entry = bytes_of(problem.keys, *(a.shape[2] for a in slots), itemsize=slots[0].dtype.itemsize)
    most = entries_of(of_entry, entries, problem.blocks)
    first = jnp.arange(majors, dtype=jnp.int32) * entries
    total = majors + majors * min(entries, problem.slots) // most
    return records_of(first, pairs.count, (pairs.slot, pairs.members, pairs.begin, pairs.keys), most, total)


def _kernel(record: Record, tile, blocks, out, state: Softmax, *, problem: Problem):
    q, limit = tile

    @pl.when(record.is_first)
    def _():
        state.maximum[...] = jnp.full_like(state.maximum, MASKED)
        state.total[...] = jnp.zeros_like(state.total)
        state.weighted[...] = jnp.zeros_like(state.weighted)

    def accumulate(first):
        entries = entries_at(record, first, problem.blocks)
        k, v = keys_of(blocks, entries, first)
        visible = jnp.concatenate([visible_of(entry, limit[...], problem) for entry in entries], axis=0)
        s = jnp.where(visible, logits(k, q[...], problem), MASKED)
        maximum = jnp.maximum(state.maximum[...], jnp.max(s, axis=0, keepdims=True))
        weights, rescale = jnp.exp(s - maximum), jnp.exp(state.maximum[...] - maximum)
        state.maximum[...] = maximum
        state.total[...] = state.total[...] * rescale + jnp.sum(weights, axis=0, keepdims=True)
        state.weighted[...] = state.weighted[...] * rescale + contract(v, weights.astype(v.dtype), (0, 0))

    for_chunks(record, problem.blocks, accumulate)

    @pl.when(record.is_last)
    def _():
        o, lse = out
        # A fully masked row has only masked logits, each with a weight of 1, or no logits.
        sees = state.maximum[...] > MASKED
        o[...] = jnp.where(sees, state.weighted[...] / state.total[...], 0).T.astype(o.dtype)
        lse[...] = jnp.where(sees, state.maximum[...] + jnp.log(state.total[...]), -jnp.inf)
