"""The backward kernels, with p = exp(s − lse), dp = do·v and δ = Σ_e do·o − dlse of each row:

    ds = p (dp − δ)       dq = scale Σ_j ds k_j       dk_j = scale Σ_i ds q_i       dv_j = Σ_i p do_i

dq is summed over the slots of a tile, as in the forward; dk and dv are summed over the tiles that list a slot, for
which the (tile, slot) pairs are sorted by slots. Results repeat bit for bit.

In float32 the weights of a row are divided by their sum, and δ is computed from them, in a pass before:

    c = 1 / Σ p,    Σ p·dp = d + c Σ (p·dp − p·d)    with d = Σ_e do·o

which removes the rounding errors of lse and of o. In 16 bits these are negligible beside those of p and ds.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from ..flash_attention.launch import vmem
from ..flash_attention.tiles import contract
from .configs import bytes_of, entries_of
from .forward import records_of_tiles
from .problem import (
    Pairs,
    Problem,
    by_slots,
    in_slots,
    in_tiles,
    out_of_slots,
    out_of_tiles,
    pairs_of,
    problem_of,
    rows_in_tiles,
)
from .records import Record, Records, for_chunks, over_records, records_of, zero_from
from .tiles import Rows, entries_at, keys_of, logits, rows_at, rows_in, visible_of, weights_of


def native_sparse_attention_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: NativeSparseAttentionSpec,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    """The cotangents of the operands named in `wrt`, in that order."""
    x, problem = primals, problem_of(primals, spec, config)
    pairs = pairs_of(x, problem)
    do = jnp.zeros_like(outputs.o) if cotangents.o is None else cotangents.o
    delta = (do.astype(jnp.float32) * outputs.o.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    sees = pairs.sees[..., None]
    q, do = (in_tiles(jnp.where(sees, a, 0), problem) for a in (x.q, do))
    slots = [in_slots(a, x, problem) for a in (x.k, x.v)]
    of_rows = rows_in(pairs, outputs.lse, problem, delta)
    if problem.is_exact:
        of_rows = _exact_rows(q, do, of_rows, slots, pairs, problem)
    if cotangents.lse is not None:
        dlse = jnp.where(pairs.sees.swapaxes(1, 2), cotangents.lse, 0)
        of_rows = of_rows.at[:, 2:3].add(-rows_in_tiles(dlse.astype(jnp.float32), problem))
    found = {}
    if "q" in wrt:
        found["q"] = out_of_tiles(_of_queries(q, do, of_rows, slots, pairs, problem), problem)
    if not {"k", "v"}.isdisjoint(wrt):
        of_keys = _of_keys(q, do, of_rows, slots, pairs, problem)
        found["k"], found["v"] = (out_of_slots(a, x, problem) for a in of_keys)
    return tuple(found[name] for name in wrt)


def _exact_rows(q, do, of_rows, slots, pairs: Pairs, problem: Problem) -> jax.Array:
    """The `Rows`, with δ and the correction computed as sums over the weights."""
    row = vmem((1, problem.rows))
    return over_records(
        partial(_rows_kernel, problem=problem),
        "native_sparse_attention_backward_rows",
        records_of_tiles(pairs, slots, problem),
        (q, do, of_rows),
        slots,
        jax.ShapeDtypeStruct(of_rows.shape, of_rows.dtype),
        (row, row),
    )


def _of_queries(q, do, of_rows, slots, pairs: Pairs, problem: Problem) -> jax.Array:
    return over_records(
        partial(_queries_kernel, problem=problem),
        "native_sparse_attention_backward_queries",
        records_of_tiles(pairs, slots, problem),
        (q, do, of_rows),
        slots,
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        vmem((q.shape[2], problem.rows)),
    )


def _of_keys(q, do, of_rows, slots, pairs: Pairs, problem: Problem) -> Any:
    k, v = slots
    return over_records(
        partial(_keys_kernel, problem=problem),
        "native_sparse_attention_backward_keys",
        _records_of_slots(pairs, (q, do), problem),
        (k, v),
        (q, do, of_rows),
        tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in slots),
        tuple(vmem(a.shape[1:]) for a in slots),
    )


def _records_of_slots(pairs: Pairs, tiles: tuple[jax.Array, ...], problem: Problem) -> Records:
    first, count, fields = by_slots(pairs, problem)
    of_entry = bytes_of(problem.rows, *(a.shape[2] for a in tiles), itemsize=tiles[0].dtype.itemsize)
    of_entry += bytes_of(8, problem.rows, itemsize=4)
    most = entries_of(of_entry, problem.tiles, problem.row_blocks)
    entries = pairs.slot.shape[0] // pairs.count.shape[0]
    total = first.shape[0] + pairs.count.shape[0] * min(entries, problem.slots) // most
    return records_of(first, count, fields, most, total)


def _rows_kernel(record: Record, tile, blocks, out, sums, *, problem: Problem):
    (q, do, of_rows), (weights, offs) = tile, sums

    @pl.when(record.is_first)
    def _():
        weights[...], offs[...] = jnp.zeros_like(weights), jnp.zeros_like(offs)

    def accumulate(first):
        of = rows_at(of_rows)
        p, dp, visible, _ = _gradient(record, first, blocks, q, do, of, problem)
        weights[...] += jnp.sum(p, axis=0, keepdims=True)
        offs[...] += jnp.sum(jnp.where(visible, p * (dp - of.delta), 0), axis=0, keepdims=True)

    for_chunks(record, problem.blocks, accumulate)

    @pl.when(record.is_last)
    def _():
        of, weight = rows_at(of_rows), weights[...]
        correction = 1 / jnp.where(weight > 0, weight, 1)
        found = Rows(of.limit, of.lse, of.delta + offs[...] * correction, correction)
        out[...] = jnp.concatenate(found, axis=0)


def _queries_kernel(record: Record, tile, blocks, dq, total, *, problem: Problem):
    q, do, of_rows = tile

    @pl.when(record.is_first)
    def _():
        total[...] = jnp.zeros_like(total)

    def accumulate(first):
        of = rows_at(of_rows)
        p, dp, visible, k = _gradient(record, first, blocks, q, do, of, problem)
        ds = jnp.where(visible, p * (dp - of.delta), 0)
        total[...] += contract(k, ds.astype(k.dtype), (0, 0))

    for_chunks(record, problem.blocks, accumulate)

    @pl.when(record.is_last)
    def _():
        dq[...] = (total[...] * problem.scale).T.astype(dq.dtype)


def _gradient(record: Record, first, blocks, q, do, of: Rows, problem: Problem):
    """p and dp [keys, rows] of some slots, which rows see which keys, and the keys."""
    entries = entries_at(record, first, problem.blocks)
    k, v = keys_of(blocks, entries, first)
    visible = jnp.concatenate([visible_of(entry, of.limit, problem) for entry in entries], axis=0)
    p = weights_of(logits(k, q[...], problem), visible, of)
    return p, contract(v, do[...], (1, 1)), visible, k


def _keys_kernel(record: Record, slot, blocks, out, totals, *, problem: Problem):
    (k, v), (q_tiles, do_tiles, rows_of_tiles) = slot, blocks

    @pl.when(record.is_first)
    def _():
        for total in totals:
            total[...] = jnp.zeros_like(total)

    def accumulate(first):
        dk, dv = totals
        places = range(problem.row_blocks)
        for n in places:
            for tiles in blocks:
                zero_from(tiles, first + n, jnp.where(first + n < record.count, tiles.shape[1], 0))
        entries = entries_at(record, first, problem.row_blocks)
        of_tiles = [rows_at(rows_of_tiles, first + n) for n in places]
        visible = [visible_of(entry, of.limit, problem) for entry, of in zip(entries, of_tiles, strict=True)]
        side_by_side = lambda arrays: jnp.concatenate(arrays, axis=1)
        of, visible = Rows(*map(side_by_side, zip(*of_tiles, strict=True))), side_by_side(visible)
        q, do = (tiles[pl.ds(first, len(places))].reshape(-1, tiles.shape[2]) for tiles in (q_tiles, do_tiles))
        p = weights_of(logits(k[...], q, problem), visible, of)
        ds = jnp.where(visible, p * (contract(v[...], do, (1, 1)) - of.delta), 0)
        dk[...] += contract(ds.astype(q.dtype), q, (1, 0))
        dv[...] += contract(p.astype(do.dtype), do, (1, 0))

    for_chunks(record, problem.row_blocks, accumulate)

    @pl.when(record.is_last)
    def _():
        for ref, total, scale in zip(out, totals, (problem.scale, 1.0), strict=True):
            ref[...] = (total[...] * scale).astype(ref.dtype)
