"""The forward kernel: softmax(s)·v by the online softmax, with lse.

Each query has a maximum m, denominator l and accumulator a over the tiles so far. A tile of logits s updates them to

    m' = max(m, max s);   l' = l·exp(m − m') + Σ exp(s − m');   a' = a·exp(m − m') + Σ exp(s − m')·v

and in the end o = a / l, lse = m + log l. With sinks, the initial values are m = logsumexp(sinks) and l = 1.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels._sequences import of_sequences
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .launch import launch, vmem
from .problem import LANES, Problem, Tile, arrange, pad_axis, plan, round_up, sink_of, split_heads
from .schedule import MaskInfo, Schedule, blocks_at, mask_info_of, schedule_of, step_at
from .tiles import (
    MASKED,
    chunks_of,
    contract,
    for_tile_mask,
    logits_of,
    mask_of,
    pipeline,
    scalar,
    scale_of,
    zero_masked_keys,
)


class Softmax(NamedTuple):
    """The online softmax of a block of queries: m and l, [1, block_q], and aᵀ, [features, block_q]."""

    maximum: Any
    total: Any
    weighted: Any


def flash_attention(*operands: jax.Array | None, spec: FlashAttentionSpec, config: KernelConfig) -> Outputs:
    operands = Operands(*operands)
    problem = plan(operands, spec, config, chunk=forward_chunk(operands))
    return forward(operands, problem, mask_info_of(operands, problem))


def forward(operands: Operands, problem: Problem, mask_info: MaskInfo) -> Outputs:
    """o and lse, from the tiles that the mask info does not exclude."""
    schedule = schedule_of(mask_info, by="queries")
    tile = arrange(operands, problem)._replace(sink=sink_of(operands.sinks, problem))
    batch, rows, heads = problem.batch, problem.padded_queries, problem.heads
    features = tile.v.shape[2] // problem.kv_heads

    out = launch(
        functools.partial(_kernel, problem=problem, schedule=schedule),
        "flash_attention_forward",
        problem,
        schedule,
        (tile,),
        Tile(
            do=jax.ShapeDtypeStruct((batch, rows, heads * features), tile.q.dtype),
            lse=jax.ShapeDtypeStruct((batch, heads, 1, rows), jnp.float32),
        ),
        where=lambda b, h, step, table: (b, h, *blocks_at(schedule, table, b, h, step)),
        grid=(batch, heads, schedule.steps),
        scratch=Softmax(
            maximum=vmem((1, problem.block_q)),
            total=vmem((1, problem.block_q)),
            weighted=vmem((problem.values, problem.block_q)),
        ),
        matmuls=(1, 1),
    )
    o = split_heads(out.do, (*operands.q.shape[:3], operands.v.shape[3]))
    return Outputs(o, of_sequences(out.lse[:, :, 0, : problem.queries], operands))


def forward_chunk(operands: Operands) -> int:
    """The keys of a chunk: with fewer, their maximum is known sooner, but the accumulator is rescaled more often."""
    return round_up(operands.v.shape[3], LANES)


def _kernel(table, tile: Tile, out: Tile, state: Softmax, *, problem: Problem, schedule: Schedule):
    b, h = pl.program_id(0), pl.program_id(1)
    step = step_at(schedule, table, b, h, pl.program_id(2))
    scale = scale_of(tile, problem, b, h)

    @pl.when(step.is_first)
    def _():
        state.maximum[...] = jnp.full_like(state.maximum, MASKED)
        state.total[...] = jnp.zeros_like(state.total)
        state.weighted[...] = jnp.zeros_like(state.weighted)
        if tile.sink is not None:
            sink = jnp.full_like(state.maximum, scalar(tile.sink, b, h))
            state.maximum[...] = jnp.maximum(sink, MASKED)
            state.total[...] = problem.exp(sink - state.maximum[...])

    def attend(tile_mask):
        def products(rows):
            return contract(tile.k[rows], tile.q[...], (1, 1))

        def use(rows, qk):
            visible = mask_of(tile_mask, tile, step.minor, rows)
            logits, _ = logits_of(tile, problem, rows, qk, scale, visible)
            maximum = jnp.maximum(state.maximum[...], jnp.max(logits, axis=0, keepdims=True))
            weights = problem.exp(logits - maximum)
            rescale = problem.exp(state.maximum[...] - maximum)
            v = zero_masked_keys(tile.v[rows, : problem.values], problem, visible)
            state.maximum[...] = maximum
            state.total[...] = state.total[...] * rescale + jnp.sum(weights, axis=0, keepdims=True)
            state.weighted[...] = state.weighted[...] * rescale + contract(v, weights.astype(v.dtype), (0, 0))

        pipeline(chunks_of(tile_mask, problem), problem.ahead, products, use)

    for_tile_mask(step, schedule, attend)

    @pl.when(step.is_last)
    def _():
        # A fully masked query has only masked logits, each with a weight of 1; it gets o = 0 and lse = −inf.
        sees_keys = state.maximum[...] > MASKED
        o = jnp.where(sees_keys, state.weighted[...] / state.total[...], 0).astype(out.do.dtype).T
        out.do[...] = pad_axis(o, 1, out.do.shape[1])
        out.lse[...] = jnp.where(
            sees_keys, (state.maximum[...] + problem.log(state.total[...])) / problem.unit, -jnp.inf
        )
