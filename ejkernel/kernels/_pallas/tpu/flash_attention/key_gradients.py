"""The backward kernel with a stationary block of keys, which loops over queries: dk, dv, and optionally dq."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.primitives.flash_attention import Operands

from .launch import block_specs, launch, vmem
from .problem import Problem, Tile, split_heads
from .schedule import Schedule, blocks_at, step_at
from .tiles import (
    chunks_of,
    contract,
    for_tile_mask,
    gradient_products,
    gradients_of,
    mask_of,
    pipeline,
    scale_of,
    zero_masked_keys,
)


def gradients_by_keys(tile: Tile, problem: Problem, schedule: Schedule, primals: Operands, wrt, with_dq: bool):
    """A Tile with those of dk and dv that `wrt` names, and with_dq also Σ ds·k in float32."""
    group = problem.group

    def where(b, g, step, member, table):
        j, i = blocks_at(schedule, table, b, g, step)
        member, i = _member(schedule, member, i)
        return b, g * group + member, i, j

    wanted = {name: getattr(tile, name) for name in ("k", "v") if name in wrt}
    outputs = Tile(**{name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in wanted.items()})
    specs = block_specs(outputs, problem, where)
    if with_dq:
        block = tile.q.shape[2] // problem.heads, problem.block_q
        dq = jax.ShapeDtypeStruct((problem.batch, problem.heads, problem.q_blocks, *block), jnp.float32)
        whole = pl.BlockSpec(
            (None, group, problem.q_blocks, *block), lambda b, g, *_: (b, g, 0, 0, 0), pipeline_mode=pl.Buffered(1)
        )
        outputs, specs = outputs._replace(q=dq), specs._replace(q=whole)
    out = launch(
        functools.partial(_kernel, problem=problem, schedule=schedule),
        "flash_attention_backward" if with_dq else "flash_attention_backward_keys",
        problem,
        schedule,
        (tile,),
        outputs,
        out_specs=specs,
        where=where,
        grid=(problem.batch, problem.kv_heads, schedule.steps, 1 if schedule.blocks_per_head else group),
        scratch=Tile(**{name: vmem((problem.block_k, x.shape[2] // problem.kv_heads)) for name, x in wanted.items()}),
        matmuls=(3 if with_dq else 2, 2),
    )
    gradients = {name: split_heads(getattr(out, name), getattr(primals, name).shape) for name in wanted}
    return gradients, out.q.transpose(0, 2, 4, 1, 3).reshape(tile.q.shape) if with_dq else None


def _member(schedule: Schedule, member, minor) -> tuple[Any, Any]:
    """The head of a group and the block of queries of a step, from the last axis of the grid or from the schedule."""
    if not schedule.blocks_per_head:
        return member, minor
    return jax.lax.div(minor, schedule.blocks_per_head), jax.lax.rem(minor, schedule.blocks_per_head)


def _kernel(table, tile: Tile, out: Tile, sums: Tile, *, problem: Problem, schedule: Schedule):
    b, g, inner = pl.program_id(0), pl.program_id(1), pl.program_id(3)
    number = pl.program_id(2)
    step = step_at(schedule, table, b, g, number)
    member, i = _member(schedule, inner, step.minor)
    scale = scale_of(tile, problem, b, g * problem.group + member)

    if out.q is not None:

        @pl.when(number == 0)
        def _():
            if schedule.blocks_per_head:

                @pl.loop(0, problem.group)
                def _(member):
                    out.q[member] = jnp.zeros_like(out.q[member])
            else:
                out.q[member] = jnp.zeros_like(out.q[member])

    @pl.when(step.is_first & (inner == 0))
    def _():
        for x in jax.tree.leaves(sums):
            x[...] = jnp.zeros_like(x)

    def accumulate(tile_mask):
        def use(rows, products):
            visible = mask_of(tile_mask, tile, step.major, rows)
            p, ds = gradients_of(tile, problem, rows, products, scale, visible)
            q, do = tile.q[...], tile.do[...]
            ds = ds.astype(q.dtype)
            if sums.v is not None:
                sums.v[rows] += contract(p.astype(do.dtype), do, (1, 0))
            if sums.k is not None:
                sums.k[rows] += scale * contract(ds, q, (1, 0))
            if out.q is not None:
                out.q[member, i] += contract(zero_masked_keys(tile.k[rows], problem, visible), ds, (0, 0))

        pipeline(chunks_of(tile_mask, problem), problem.ahead, functools.partial(gradient_products, tile), use)

    for_tile_mask(step, schedule, accumulate)

    @pl.when(step.is_last & (inner == pl.num_programs(3) - 1))
    def _():
        if sums.k is not None:
            out.k[...] = sums.k[...].astype(out.k.dtype)
        if sums.v is not None:
            out.v[...] = sums.v[...].astype(out.v.dtype)
