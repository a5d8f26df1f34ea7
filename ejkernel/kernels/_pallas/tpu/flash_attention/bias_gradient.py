"""The gradient of a bias: ds, summed inside the kernel over the axes along which the bias was broadcast."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import launch, vmem
from .problem import Problem, Tile
from .schedule import MaskInfo, Schedule, blocks_at, schedule_of, step_at
from .tiles import chunks_of, for_tile_mask, gradient_products, gradients_of, mask_of, pipeline, scale_of


def bias_gradient(tile: Tile, problem: Problem, mask_info: MaskInfo, bias: jax.Array) -> jax.Array:
    """dbias: ds, summed over the axes along which the bias was broadcast, which are innermost in the grid."""
    batch, heads = (n if n > 1 else 1 for n in bias.shape[:2])
    summed_heads = problem.heads // heads
    # A bias of one column is not padded to a block of keys, whether there are one key or many.
    one_row, one_column = bias.shape[2] < problem.queries, bias.shape[3] == 1
    schedule = schedule_of(mask_info, by="keys" if one_row else "queries", every=True)

    def where(b, h, step, member, table):
        b, h = b + jax.lax.div(member, summed_heads), h + jax.lax.rem(member, summed_heads)
        blocks = blocks_at(schedule, table, b, h, step)
        return b, h, *(blocks[::-1] if one_row else blocks)

    array = tile.key_bias if tile.bias is None else tile.bias
    out = jax.ShapeDtypeStruct(array.shape, bias.dtype)
    out = launch(
        functools.partial(_kernel, problem=problem, schedule=schedule, where=where, sums=(one_column, one_row)),
        "flash_attention_backward_bias",
        problem,
        schedule,
        (tile,),
        Tile(key_bias=out) if tile.bias is None else Tile(bias=out),
        where=where,
        grid=(batch, heads, schedule.steps, problem.batch // batch * summed_heads),
        scratch=vmem((problem.block_k, problem.block_q)),
        matmuls=(1, 1),
    )
    if tile.bias is None:
        return out.key_bias[:, :, :, : bias.shape[3]]
    return out.bias.swapaxes(2, 3)[:, :, : bias.shape[2], : bias.shape[3]]


def _kernel(table, tile: Tile, out: Tile, total, *, problem: Problem, schedule: Schedule, where, sums):
    one_column, one_row = sums
    position = tuple(pl.program_id(axis) for axis in range(4))
    b, h, _, j = where(*position, table)
    scale = scale_of(tile, problem, b, h)
    step, member, members = step_at(schedule, table, b, h, position[2]), position[3], pl.num_programs(3)
    every_tile = not one_row and not one_column
    is_first, is_last = step.is_first | every_tile, step.is_last | every_tile
    if one_row and one_column:
        is_first, is_last = position[2] == 0, position[2] == pl.num_programs(2) - 1

    @pl.when(is_first & (member == 0))
    def _():
        total[...] = jnp.zeros_like(total)

    def accumulate(tile_mask):
        def use(rows, products):
            total[rows] += gradients_of(tile, problem, rows, products, scale, mask_of(tile_mask, tile, j, rows))[1]

        pipeline(chunks_of(tile_mask, problem), problem.ahead, functools.partial(gradient_products, tile), use)

    for_tile_mask(step, schedule, accumulate)

    @pl.when(is_last & (member == members - 1))
    def _():
        ds = total[...]
        if one_column:
            ds = ds.sum(0, keepdims=True)
        if one_row:
            ds = ds.sum(1, keepdims=True)
        if out.key_bias is not None:
            out.key_bias[...] = ds.T.astype(out.key_bias.dtype)
        else:
            out.bias[...] = ds.astype(out.bias.dtype)
