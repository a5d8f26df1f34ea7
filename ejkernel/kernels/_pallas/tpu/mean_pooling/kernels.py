"""The kernels of mean_pooling on TPU: a segment gathers the sums of its tiles, a tile the gradients of its segments.

Both walk over the same tokens, visit by visit, the one segment by segment and the other tile by tile.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.primitives.mean_pooling import MeanPoolingSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .. import _visits
from .._visits import rows_inside


def mean_pooling(*operands: jax.Array | None, spec: MeanPoolingSpec, config: KernelConfig) -> Outputs:
    """o [b, n, d]."""
    return Outputs(_means(Operands(*operands), config))


def mean_pooling_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: MeanPoolingSpec, config: KernelConfig
) -> Outputs:
    """The tangent of o, which is linear in x."""
    return Outputs(_means(Operands(tangents.x, primals.segments), config))


def _means(operands: Operands, config: KernelConfig) -> jax.Array:
    x, bounds, lengths = operands.x, *_ends_of(operands)
    (b, s, d), n, size = x.shape, bounds.shape[1] - 1, config.block_q
    features = _visits.cut(d, config.block_k)
    batch = jnp.repeat(jnp.arange(b), n)
    starts, ends = bounds[:, :-1].reshape(-1), bounds[:, 1:].reshape(-1)
    table = _visits.visits(batch, starts, ends, size, b * _visits.most_visits(s, size, n), at_least=1)

    def of_tokens(j, v, table):
        visit = _visits.at(table, v)
        return visit.batch, visit.tile, j

    sums = pl.pallas_call(
        _sum_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(d // features, _visits.count_of(table)),
            in_specs=[pl.BlockSpec((None, size, features), of_tokens)],
            out_specs=pl.BlockSpec((None, 1, features), lambda j, v, table: (_visits.at(table, v).segment, 0, j)),
            scratch_shapes=[],
        ),
        out_shape=jax.ShapeDtypeStruct((b * n, 1, d), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="mean_pooling_sums",
    )(table, x)
    return (sums.reshape(b, n, d) / lengths).astype(x.dtype)


def mean_pooling_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: MeanPoolingSpec,
    config: KernelConfig,
) -> tuple[jax.Array]:
    """The cotangent of x [b, s, d]."""
    x, bounds, lengths = primals.x, *_ends_of(primals)
    (_, s, d), n, size = x.shape, bounds.shape[1] - 1, config.block_q
    features = _visits.cut(d, config.block_k)
    table = _visits.covering_visits(bounds, s, size)
    shares = (cotangents.o.astype(jnp.float32) / lengths)[:, :, None]

    def of_tokens(j, v, table):
        visit = _visits.at(table, v)
        return visit.batch, visit.tile, j

    def of_segment(j, v, table):
        visit = _visits.at(table, v)
        return visit.batch, _visits.covered_segment(visit, n), 0, j

    dx = pl.pallas_call(
        _spread_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(d // features, _visits.count_of(table)),
            in_specs=[pl.BlockSpec((None, None, 1, features), of_segment)],
            out_specs=pl.BlockSpec((None, size, features), of_tokens),
            scratch_shapes=[],
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="mean_pooling_spread",
    )(table, shares)
    return (dx,)


def _ends_of(operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Where segments begin and the last ends [b, n + 1], and how long each is [b, n, 1] float32, at least 1."""
    (b, s, _), segments = operands.x.shape, operands.segments
    if segments is None:
        segments = jnp.array([[[0, s]]], jnp.int32)
    segments = jnp.broadcast_to(segments, (b, *segments.shape[1:]))
    bounds = jnp.concatenate([segments[:, :1, 0], segments[:, :, 1]], axis=1)
    return bounds, jnp.maximum(segments[..., 1:] - segments[..., :1], 1).astype(jnp.float32)


def _sum_kernel(table, x, o):
    number = pl.program_id(1)
    visit = _visits.at(table, number)

    @pl.when(_visits.begins(table, number, lambda v: v.segment))
    def _():
        o[...] = jnp.zeros_like(o)

    @pl.when(visit.start < visit.end)
    def _():
        tokens = jnp.where(rows_inside(visit, x.shape[0]), x[...].astype(jnp.float32), 0)
        o[...] += tokens.sum(0, keepdims=True)


def _spread_kernel(table, share, dx):
    number = pl.program_id(1)
    visit = _visits.at(table, number)

    @pl.when(_visits.tile_begins(table, number))
    def _():
        dx[...] = jnp.zeros_like(dx)

    dx[...] = jnp.where(rows_inside(visit, dx.shape[0]), share[...].astype(dx.dtype), dx[...])
