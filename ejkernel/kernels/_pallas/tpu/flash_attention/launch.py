"""The common call of all kernels: arrays and outputs as Tiles, with blocks in the order of the tile schedule."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .. import VMEM_BYTES
from .problem import Problem, Tile
from .schedule import Schedule

# Accumulators are float32.
vmem = partial(pltpu.VMEM, dtype=jnp.float32)


def launch(
    kernel: Callable,
    name: str,
    problem: Problem,
    schedule: Schedule,
    inputs: tuple[Tile, ...],
    outputs: Tile,
    *,
    where: Callable,
    grid: tuple[Any, ...],
    scratch: Any,
    matmuls: tuple[int, int],
    out_specs: Tile | None = None,
) -> Tile:
    """Runs `kernel(table, *input tiles, output tile, scratch)` over a grid whose first two axes are parallel.

    `where(*grid position, table)` is the (batch, head, query block, key block) of a step. `matmuls` is the number of
    products per tile over the features of q and over those of v.
    """
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (inputs, outputs))
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[block_specs(tile, problem, where) for tile in inputs],
            out_specs=[block_specs(outputs, problem, where) if out_specs is None else out_specs],
            scratch_shapes=[scratch],
        ),
        out_shape=[outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", *("arbitrary",) * (len(grid) - 2)),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        cost_estimate=_cost(problem, schedule, inputs[0], jax.tree.leaves(arrays), matmuls),
        name=name,
    )(jnp.asarray(schedule.table), *inputs)[0]


def _cost(problem: Problem, schedule: Schedule, tile: Tile, arrays: list[Any], matmuls: tuple[int, int]):
    """The cost estimate of the computed tiles (all, if the schedule is traced); each reads its keys and values."""
    tiles = schedule.tiles(problem.batch) * problem.heads
    d, e = tile.q.shape[2] // problem.heads, tile.v.shape[2] // problem.kv_heads
    logits = tiles * problem.block_q * problem.block_k
    fetched = tiles * problem.block_k * (d + e) * tile.k.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * logits * (matmuls[0] * d + matmuls[1] * e),
        transcendentals=logits * (1 if problem.spec.softcap is None else 2),
        bytes_accessed=fetched + sum(x.size * x.dtype.itemsize for x in arrays),
    )


def block_specs(tile: Tile, problem: Problem, where: Callable) -> Tile:
    """The block of each array that belongs to one tile."""
    block_q, block_k = problem.block_q, problem.block_k

    def at(index):
        return lambda *position: index(*where(*position))

    def queries(x):
        return pl.BlockSpec((None, block_q, x.shape[2] // problem.heads), at(lambda b, h, i, j: (b, i, h)))

    def keys(x):
        size = x.shape[2] // problem.kv_heads
        return pl.BlockSpec((None, block_k, size), at(lambda b, h, i, j: (b, j, jax.lax.div(h, problem.group))))

    def broadcast(x, rows, columns, index):
        # An axis of size 1 is one block, which all steps read.
        block = [1 if size == 1 else block for size, block in zip(x.shape[2:], (rows, columns), strict=True)]
        one = at(lambda *logit: tuple(0 if n == 1 else k for n, k in zip(x.shape, index(*logit), strict=True)))
        return pl.BlockSpec((None, None, *block), one)

    per_logit = lambda x: broadcast(x, block_k, block_q, lambda b, h, i, j: (b, h, j, i))
    per_query = lambda x: broadcast(x, 1, block_q, lambda b, h, i, j: (b, h, 0, i))
    per_key = lambda x: broadcast(x, 1, block_k, lambda b, h, i, j: (b, h, 0, j))
    scalars = lambda x: pl.BlockSpec(memory_space=pltpu.SMEM)
    spec_of = Tile(
        q=queries, k=keys, v=keys, do=queries, lse=per_query, delta=per_query, correction=per_query,
        bias=per_logit, key_bias=per_key, mask=per_logit, key_mask=per_key, first=per_query, last=per_query,
        q_segments=per_query, k_segments=per_key, scale=scalars, sink=scalars,
    )  # fmt: skip
    return Tile(*(None if x is None else of(x) for of, x in zip(spec_of, tile, strict=True)))
