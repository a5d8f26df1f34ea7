"""The tangent kernel: ȯ and l̇se in one pass over the slots of a tile.

With the weights p = exp(s − lse), whose sum w is 1 up to the rounding of lse, and

    ṡ = scale·(q̇·k + q·k̇)

the tangents are those of a quotient by w, with lse as a constant:

    l̇se = Σ_j p ṡ / w        ȯ = (Σ_j p (ṡ − l̇se) v + Σ_j p v̇) / w

p (ṡ − c) is rounded for the matrix unit, with c the mean Σ p ṡ / w over the keys so far. As c changes to c', the sum is
corrected by (c − c') Σ p v, and in the end c is l̇se.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from ..flash_attention.launch import vmem
from ..flash_attention.tiles import contract
from .forward import records_of_tiles
from .problem import Problem, in_slots, in_tiles, out_of_tiles, pairs_of, problem_of, rows_out_of_tiles
from .records import Record, for_chunks, over_records
from .tiles import entries_at, keys_of, logits, rows_at, rows_in, visible_of, weights_of


class Sums(NamedTuple):
    """The running sums in float32: w, Σ p ṡ [1, rows], Σ p v and Σ p (ṡ − c) v + Σ p v̇ [features, rows]."""

    weight: Any
    moved: Any
    values: Any
    tangents: Any


class Tile(NamedTuple):
    """q, q̇ [rows, features] and the `Rows` of a tile; None for a tangent that is zero."""

    q: Any
    q_dot: Any
    rows: Any


def native_sparse_attention_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: NativeSparseAttentionSpec,
    config: KernelConfig,
) -> Outputs:
    """The tangents of o and lse."""
    x, problem = primals, problem_of(primals, spec, config)
    pairs, features = pairs_of(x, problem), x.v.shape[3]
    of_queries = lambda a: None if a is None else in_tiles(jnp.where(pairs.sees[..., None], a, 0), problem)
    tile = Tile(of_queries(x.q), of_queries(tangents.q), rows_in(pairs, outputs.lse, problem))
    moving = [name for name in ("k", "v") if getattr(tangents, name) is not None]
    slots = [in_slots(a, x, problem) for a in (x.k, x.v, *(getattr(tangents, name) for name in moving))]
    row, column = vmem((1, problem.rows)), vmem((features, problem.rows))
    o, lse = over_records(
        partial(_kernel, problem=problem, moving=moving),
        "native_sparse_attention_tangent",
        records_of_tiles(pairs, slots, problem),
        tile,
        slots,
        (
            jax.ShapeDtypeStruct((*tile.q.shape[:2], features), x.q.dtype),
            jax.ShapeDtypeStruct((tile.q.shape[0], 1, problem.rows), jnp.float32),
        ),
        Sums(row, row, column, column),
    )
    return Outputs(out_of_tiles(o, problem), rows_out_of_tiles(lse, problem))


def _kernel(record: Record, tile: Tile, blocks, out, sums: Sums, *, problem: Problem, moving: list[str]):
    @pl.when(record.is_first)
    def _():
        for ref in sums:
            ref[...] = jnp.zeros_like(ref)

    def accumulate(first):
        of = rows_at(tile.rows)
        entries = entries_at(record, first, problem.blocks)
        k, v, *rest = keys_of(blocks, entries, first)
        dots = dict(zip(moving, rest, strict=True))
        visible = jnp.concatenate([visible_of(entry, of.limit, problem) for entry in entries], axis=0)
        p = weights_of(logits(k, tile.q[...], problem), visible, of)
        s_dot = jnp.zeros_like(p)
        if tile.q_dot is not None:
            s_dot += logits(k, tile.q_dot[...], problem)
        if "k" in dots:
            s_dot += logits(dots["k"], tile.q[...], problem)
        before = _mean(sums)
        sums.weight[...] += jnp.sum(p, axis=0, keepdims=True)
        sums.moved[...] += jnp.sum(p * s_dot, axis=0, keepdims=True)
        mean = _mean(sums)
        centred = (p * (s_dot - mean)).astype(v.dtype)
        sums.tangents[...] += (before - mean) * sums.values[...] + contract(v, centred, (0, 0))
        sums.values[...] += contract(v, p.astype(v.dtype), (0, 0))
        if "v" in dots:
            sums.tangents[...] += contract(dots["v"], p.astype(v.dtype), (0, 0))

    for_chunks(record, problem.blocks, accumulate)

    @pl.when(record.is_last)
    def _():
        o, lse = out
        weight = sums.weight[...]
        o[...] = (sums.tangents[...] / jnp.where(weight > 0, weight, 1)).T.astype(o.dtype)
        lse[...] = _mean(sums)


def _mean(sums: Sums) -> jax.Array:
    """Σ p ṡ / w; 0 if all weights are 0."""
    weight = sums.weight[...]
    return sums.moved[...] / jnp.where(weight > 0, weight, 1)
