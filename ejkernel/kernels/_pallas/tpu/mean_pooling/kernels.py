"""The kernels of mean_pooling on TPU: one sums the rows of a segment over tiles, one spreads gradients over a tile.

Both loop over work items: the forward segment by segment, the backward tile by tile.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.primitives.mean_pooling import MeanPoolingSpec, Operands, Outputs
from ejkernel.types.mean_pooling import MeanPoolingConfig

from .._work_list import (
    count_of,
    is_first,
    is_first_of_tile,
    item_at,
    largest_block,
    most_work_items,
    row_mask,
    segment_in_batch,
    work_list,
    work_list_of_all_tiles,
)


def mean_pooling(*operands: jax.Array | None, spec: MeanPoolingSpec, config: MeanPoolingConfig) -> Outputs:
    """o [b, n, d]."""
    return Outputs(_means(Operands(*operands), config))


def mean_pooling_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: MeanPoolingSpec, config: MeanPoolingConfig
) -> Outputs:
    """The tangent of o, which is linear in x."""
    return Outputs(_means(Operands(tangents.x, primals.segments), config))


def _means(operands: Operands, config: MeanPoolingConfig) -> jax.Array:
    x, bounds, lengths = operands.x, *_ends_of(operands)
    (b, s, d), n, size = x.shape, bounds.shape[1] - 1, config.block_s
    features = largest_block(d, config.block_d)
    batch = jnp.repeat(jnp.arange(b), n)
    starts, ends = bounds[:, :-1].reshape(-1), bounds[:, 1:].reshape(-1)
    items = work_list(batch, starts, ends, size, b * most_work_items(s, size, n), at_least=1)

    def of_tokens(j, step, items):
        item = item_at(items, step)
        return item.batch, item.tile, j

    sums = pl.pallas_call(
        _sum_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(d // features, count_of(items)),
            in_specs=[pl.BlockSpec((None, size, features), of_tokens)],
            out_specs=pl.BlockSpec((None, 1, features), lambda j, step, items: (item_at(items, step).segment, 0, j)),
            scratch_shapes=[],
        ),
        out_shape=jax.ShapeDtypeStruct((b * n, 1, d), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="mean_pooling_sums",
    )(items, x)
    return (sums.reshape(b, n, d) / lengths).astype(x.dtype)


def mean_pooling_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: MeanPoolingSpec,
    config: MeanPoolingConfig,
) -> tuple[jax.Array]:
    """The cotangent of x [b, s, d]."""
    x, bounds, lengths = primals.x, *_ends_of(primals)
    (_, s, d), n, size = x.shape, bounds.shape[1] - 1, config.block_s
    features = largest_block(d, config.block_d)
    items = work_list_of_all_tiles(bounds, s, size)
    shares = (cotangents.o.astype(jnp.float32) / lengths)[:, :, None]

    def of_tokens(j, step, items):
        item = item_at(items, step)
        return item.batch, item.tile, j

    def of_segment(j, step, items):
        item = item_at(items, step)
        return item.batch, segment_in_batch(item, n), 0, j

    dx = pl.pallas_call(
        _spread_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(d // features, count_of(items)),
            in_specs=[pl.BlockSpec((None, None, 1, features), of_segment)],
            out_specs=pl.BlockSpec((None, size, features), of_tokens),
            scratch_shapes=[],
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="mean_pooling_spread",
    )(items, shares)
    return (dx,)


def _ends_of(operands: Operands) -> tuple[jax.Array, jax.Array]:
    """The bounds of segments [b, n + 1], and their lengths [b, n, 1] float32, at least 1."""
    (b, s, _), segments = operands.x.shape, operands.segments
    if segments is None:
        segments = jnp.array([[[0, s]]], jnp.int32)
    segments = jnp.broadcast_to(segments, (b, *segments.shape[1:]))
    bounds = jnp.concatenate([segments[:, :1, 0], segments[:, :, 1]], axis=1)
    return bounds, jnp.maximum(segments[..., 1:] - segments[..., :1], 1).astype(jnp.float32)


def _sum_kernel(items, x, o):
    step = pl.program_id(1)
    item = item_at(items, step)

    @pl.when(is_first(items, step, lambda item: item.segment))
    def _():
        o[...] = jnp.zeros_like(o)

    @pl.when(item.start < item.end)
    def _():
        tokens = jnp.where(row_mask(item, x.shape[0]), x[...].astype(jnp.float32), 0)
        o[...] += tokens.sum(0, keepdims=True)


def _spread_kernel(items, share, dx):
    step = pl.program_id(1)
    item = item_at(items, step)

    @pl.when(is_first_of_tile(items, step))
    def _():
        dx[...] = jnp.zeros_like(dx)

    dx[...] = jnp.where(row_mask(item, dx.shape[0]), share[...].astype(dx.dtype), dx[...])
