"""One more pass over the keys, for sums over rows that gradients in float32 need more exactly than lse and o give them.

The weights p = exp(s − lse) of a row, sinks included, sum to 1 up to the rounding of lse, and Σ p·dp equals d = Σ do·o
up to the rounding of o and of that sum. Both errors are removed by

    c = 1 / Σ p,    Σ p·dp = d + c Σ (p·dp − p·d)    where dp of a sink is 0

where the difference is exact if one key has all the weight. In 16 bits both errors are negligible beside the rounding
of p and ds. The weights of a split of the keys do not sum to 1, and are not corrected.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import launch, vmem
from .problem import SMALLEST_SUM, Problem, Tile
from .schedule import Schedule, blocks_at, step_at
from .tiles import chunks_of, for_tile_mask, gradient_products, logits_of, mask_of, pipeline, scalar, scale_of


class Sums(NamedTuple):
    """The sums of a block of queries over the tiles so far."""

    weight: Any  # Σ p, [1, block_q]
    off: Any  # Σ (p·dp − p·d), [1, block_q]


def exact_rows(tile: Tile, problem: Problem, schedule: Schedule) -> tuple[jax.Array, jax.Array]:
    """c and Σ p·dp of every row, [b,h,s], from a tile with lse, d as delta, and sink."""
    row = vmem((1, problem.block_q))
    out = launch(
        functools.partial(_kernel, problem=problem, schedule=schedule),
        "flash_attention_backward_rows",
        problem,
        schedule,
        (tile,),
        Tile(correction=jax.ShapeDtypeStruct.like(tile.lse), delta=jax.ShapeDtypeStruct.like(tile.delta)),
        where=lambda b, h, step, table: (b, h, *blocks_at(schedule, table, b, h, step)),
        grid=(problem.batch, problem.heads, schedule.steps),
        scratch=Sums(weight=row, off=row),
        matmuls=(1, 1),
    )
    return out.correction[:, :, 0, : problem.queries], out.delta[:, :, 0, : problem.queries]


def _kernel(table, tile: Tile, out: Tile, sums: Sums, *, problem: Problem, schedule: Schedule):
    b, h = pl.program_id(0), pl.program_id(1)
    step = step_at(schedule, table, b, h, pl.program_id(2))
    scale = scale_of(tile, problem, b, h)

    @pl.when(step.is_first)
    def _():
        sink = jnp.zeros_like(tile.lse[...])
        if tile.sink is not None:
            sink = problem.exp_of_lse(scalar(tile.sink, b, h) - tile.lse[...], corrected=True)
        sums.weight[...] = sink
        sums.off[...] = -sink * tile.delta[...]

    def accumulate(tile_mask):
        def use(rows, products):
            qk, dp = products
            visible = mask_of(tile_mask, tile, step.minor, rows)
            logits, _ = logits_of(tile, problem, rows, qk, scale, visible)
            p = problem.exp_of_lse(logits - tile.lse[...], corrected=True)
            off = p * (dp - tile.delta[...])
            if visible is not None and problem.hidden:
                off = jnp.where(visible, off, 0)
            sums.weight[...] += jnp.sum(p, axis=0, keepdims=True)
            sums.off[...] += jnp.sum(off, axis=0, keepdims=True)

        pipeline(chunks_of(tile_mask, problem), problem.ahead, functools.partial(gradient_products, tile), use)

    for_tile_mask(step, schedule, accumulate)

    @pl.when(step.is_last)
    def _():
        weight = sums.weight[...]
        correction = 1 / jnp.where(weight > SMALLEST_SUM, weight, 1)
        out.correction[...] = correction
        out.delta[...] = tile.delta[...] + sums.off[...] * correction
