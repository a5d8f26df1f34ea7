"""The tangent kernel: the tangents of o and lse in one pass over the keys.

With y the capped logits and p = exp(y − lse), the tangents of a query are

    lsė = Σ p·ẏ;   ȯ = Σ p·(ẏ − lsė)·v + Σ p·v̇;   ẏ = slope·(scale·(k·q̇ + k̇·q) + scalė·k·q + biaṡ)

lsė is not known before the end, and Σ p·ẏ·v − lsė·o would cancel badly if one key has all the weight. So ẏ is taken
relative to the mean over the tiles so far, c = Σ p·ẏ / Σ p, and the sum is corrected as the mean changes to c':

    a ← a − (c' − c)·Σ p·v + Σ_tile p·(ẏ − c')·v + Σ_tile p·v̇

The tangent of lse from sinks, Σ exp(sink − lse)·sinkė, is added after the kernel. All weights have the rounding of lse
as a common factor, so results are divided by their sum Σ p + exp(sink − lse), although it is nearly 1.

Of a split of the keys, where lse is that of all keys, this sum is not known. The kernel gives Σ p·ẏ and, in float32,
Σ p·ẏ·v + Σ p·v̇ = a + c·Σ p·v, and o·lsė is subtracted after it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .launch import launch, vmem
from .problem import (
    SMALLEST_SUM,
    Problem,
    Tile,
    arrange,
    arrange_differentiable,
    lse_in_units,
    per_query,
    plan,
    sink_of,
    split_heads,
)
from .schedule import MaskInfo, Schedule, blocks_at, mask_info_of, schedule_of, step_at
from .tiles import (
    chunks_of,
    column,
    contract,
    for_tile_mask,
    logits_of,
    mask_of,
    of_rows,
    pipeline,
    scalar,
    scale_of,
    zero_masked_keys,
)


class Moments(NamedTuple):
    """The sums of a block of queries over the tiles so far."""

    weight: Any  # Σ p, [1, block_q]
    change: Any  # Σ p·ẏ, [1, block_q]
    value: Any  # Σ p·v, [features, block_q]
    moved: Any  # a, [features, block_q]


def flash_attention_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: FlashAttentionSpec, config: KernelConfig
) -> Outputs:
    problem = plan(primals, spec, config)
    return tangent(primals, outputs, tangents, problem, mask_info_of(primals, problem))


def tangent(primals: Operands, outputs: Outputs, tangents: Operands, problem: Problem, mask_info: MaskInfo) -> Outputs:
    """The tangents of o and lse, from the tiles that the mask info does not exclude."""
    schedule, spec = schedule_of(mask_info, by="queries"), problem.spec
    lse = lse_in_units(outputs.lse, problem)
    tile = arrange(primals, problem)._replace(
        lse=per_query(lse, problem, constant_values=jnp.inf), sink=sink_of(primals.sinks, problem)
    )
    batch, rows, heads = problem.batch, problem.padded_queries, problem.heads
    features = tile.v.shape[2] // problem.kv_heads
    row, block = vmem((1, problem.block_q)), vmem((features, problem.block_q))

    out = launch(
        functools.partial(_kernel, problem=problem, schedule=schedule),
        "flash_attention_tangent",
        problem,
        schedule,
        (tile, arrange_differentiable(tangents, problem)),
        Tile(
            do=jax.ShapeDtypeStruct((batch, rows, heads * features), jnp.float32 if spec.split else tile.q.dtype),
            lse=jax.ShapeDtypeStruct((batch, heads, 1, rows), jnp.float32),
        ),
        where=lambda b, h, step, table: (b, h, *blocks_at(schedule, table, b, h, step)),
        grid=(batch, heads, schedule.steps),
        scratch=Moments(weight=row, change=row, value=block, moved=block),
        matmuls=(3, 3),
    )
    o, lse_change = split_heads(out.do, outputs.o.shape), out.lse[:, :, 0, : problem.queries]
    of_o = [lse_change] if spec.split else []
    if tangents.sinks is not None:
        sinks = primals.sinks[:, :, :, None] * problem.unit
        weights = problem.exp_of_lse(sinks - lse[:, :, None], corrected=False)
        sink_change = (weights * tangents.sinks[:, :, :, None]).sum(2)
        lse_change = lse_change + sink_change
        of_o.append(sink_change)
    if of_o:
        o = (o - sum(of_o).swapaxes(1, 2)[:, :, :, None] * outputs.o).astype(outputs.o.dtype)
    return Outputs(o, lse_change)


def _kernel(table, tile: Tile, dots: Tile, out: Tile, state: Moments, *, problem: Problem, schedule: Schedule):
    b, h = pl.program_id(0), pl.program_id(1)
    step = step_at(schedule, table, b, h, pl.program_id(2))
    scale = scale_of(tile, problem, b, h)

    @pl.when(step.is_first)
    def _():
        for x in state:
            x[...] = jnp.zeros_like(x)

    def mean():
        weight = state.weight[...]
        return jnp.where(weight > SMALLEST_SUM, state.change[...] / weight, 0)

    def move(tile_mask):
        def products(rows):
            # k·q̇ + k̇·q is one product over the features of both, which fill a matrix unit of 256 rows.
            pairs = [(k, q) for k, q in ((tile.k, dots.q), (dots.k, tile.q)) if k is not None and q is not None]
            change = None
            if pairs:
                keys, queries = zip(*((k[rows], q[...]) for k, q in pairs), strict=True)
                change = contract(jnp.concatenate(keys, 1), jnp.concatenate(queries, 1), (1, 1))
            return contract(tile.k[rows], tile.q[...], (1, 1)), change

        def use(rows, products):
            visible = mask_of(tile_mask, tile, step.minor, rows)
            logits, slope = logits_of(tile, problem, rows, products[0], scale, visible)
            p = problem.exp_of_lse(logits - tile.lse[...], corrected=not problem.spec.split)
            change = _logit_change(dots, problem, rows, products, scale, slope, visible, (b, h))
            before = mean()
            state.weight[...] += jnp.sum(p, axis=0, keepdims=True)
            state.change[...] += jnp.sum(p * change, axis=0, keepdims=True)
            after = mean()
            v = zero_masked_keys(tile.v[rows], problem, visible)
            moved = contract(v, (p * (change - after)).astype(v.dtype), (0, 0))
            if dots.v is not None:
                moved += contract(zero_masked_keys(dots.v[rows], problem, visible), p.astype(v.dtype), (0, 0))
            state.moved[...] += moved - (after - before) * state.value[...]
            state.value[...] += contract(v, p.astype(v.dtype), (0, 0))

        pipeline(chunks_of(tile_mask, problem), problem.ahead, products, use)

    for_tile_mask(step, schedule, move)

    @pl.when(step.is_last)
    def _():
        if problem.spec.split:
            out.do[...] = (state.moved[...] + mean() * state.value[...]).T
            out.lse[...] = state.change[...]
            return
        total = state.weight[...]
        if tile.sink is not None:
            total += problem.exp_of_lse(scalar(tile.sink, b, h) - tile.lse[...], corrected=True)
        total = jnp.where(total > SMALLEST_SUM, total, 1)
        change = state.change[...] / total
        out.do[...] = ((state.moved[...] - (change - mean()) * state.value[...]) / total).T.astype(out.do.dtype)
        out.lse[...] = change


def _logit_change(dots: Tile, problem: Problem, rows: slice, products, scale, slope, visible, head) -> jax.Array:
    """ẏ of the equation above, from those tangents that are present."""
    qk, change = products
    change = jnp.zeros_like(qk) if change is None else scale * change
    if dots.scale is not None:
        change += problem.spec.softmax_scale * scalar(dots.scale, *head) * qk
    if dots.bias is not None:
        change += of_rows(dots.bias, rows).astype(jnp.float32)
    if dots.key_bias is not None:
        change += column(dots.key_bias, rows).astype(jnp.float32)
    if slope is not None:
        change = change * slope
    return jnp.where(visible, change, 0) if visible is not None and problem.hidden else change
