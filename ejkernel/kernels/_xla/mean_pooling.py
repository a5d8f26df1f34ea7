"""mean_pooling in plain JAX: the formula, and its decomposition into tiles of tokens of one segment each.

o_n = Σ_{t∈n} x_t / |n|        dx_t = do_n / |n|        an empty segment gives 0
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.primitives.mean_pooling import MeanPoolingSpec, Operands, Outputs
from ejkernel.types import Target
from ejkernel.types.mean_pooling import MeanPoolingConfig
from ejkernel.xla_utils.groups import row_tiles
from ejkernel.xla_utils.search import entries_until
from ejkernel.xla_utils.symbolic import at_most

from .._registry import Backend, Platform, configured_by, kernel_registry


def reference(*operands, spec=MeanPoolingSpec()) -> Outputs:
    """The formula, with a weight for every pair of a segment and a token; differentiable to any order."""
    x, segments = Operands(*operands)
    dtype = np.promote_types(x.dtype, np.float32)
    token = jnp.arange(x.shape[1], dtype=jnp.int32)[None, None]
    if segments is None:
        segments = jnp.array([[[0, x.shape[1]]]], jnp.int32)
    member = (token >= segments[..., :1]) & (token < segments[..., 1:])
    x = jnp.where(member.any(1)[..., None], x, jnp.zeros((), x.dtype)).astype(dtype)
    member = member.astype(dtype)
    weights = member / jnp.maximum(member.sum(-1, keepdims=True), jnp.ones((), dtype))
    o = jnp.einsum("bns,bsd->bnd", jnp.broadcast_to(weights, (x.shape[0], *weights.shape[1:])), x, precision="highest")
    return Outputs(o.astype(operands[0].dtype))


def heuristic(spec: MeanPoolingSpec, operands: Operands, target: Target) -> MeanPoolingConfig:
    """Tiles of as many tokens as a segment has on average, from 16 to 256."""
    segments = 1 if operands.segments is None else operands.segments.shape[1]
    tokens = operands.x.shape[1] // max(1, segments)
    return MeanPoolingConfig(block_s=spec.chunk_size or min(256, max(16, 2 ** math.ceil(math.log2(max(1, tokens))))))


def space(spec: MeanPoolingSpec, operands: Operands, target: Target) -> list[MeanPoolingConfig]:
    """The config of the heuristic alone: others would gain nothing."""
    return [heuristic(spec, operands, target)]


@kernel_registry.register("mean_pooling", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@partial(jax.jit, static_argnames=("spec", "config"))
def mean_pooling(
    *operands: Array | None, spec: MeanPoolingSpec = MeanPoolingSpec(), config: MeanPoolingConfig = MeanPoolingConfig()
) -> Outputs:
    """o, from the sum of each tile and then the sum of the tiles of each segment."""
    x, segments = Operands(*operands)
    (b, s, d), dtype = x.shape, np.promote_types(x.dtype, np.float32)
    if segments is None:
        return Outputs((x.sum(1, keepdims=True, dtype=dtype) / jnp.maximum(1, s)).astype(x.dtype))
    segments = jnp.broadcast_to(segments, (b, *segments.shape[1:]))
    tiles = row_tiles(segments[..., 0], segments[..., 1], s, max(1, at_most(config.block_s, s)))
    batch = jnp.arange(b)[:, None]
    parts = x.at[batch[..., None], tiles.rows].get(mode="fill", fill_value=0).sum(2, dtype=dtype)
    totals = jnp.zeros((b, segments.shape[1], d), dtype).at[batch, tiles.group].add(parts)
    return Outputs((totals / _lengths(segments, dtype)).astype(x.dtype))


@kernel_registry.register("mean_pooling_jvp", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
def mean_pooling_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: MeanPoolingSpec = MeanPoolingSpec(),
    config: MeanPoolingConfig = MeanPoolingConfig(),
) -> Outputs:
    """The tangent of o, which is linear in x."""
    return mean_pooling(tangents.x, primals.segments, spec=spec, config=config)


@kernel_registry.register("mean_pooling_bwd", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@partial(jax.jit, static_argnames=("wrt", "spec", "config"))
def mean_pooling_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: MeanPoolingSpec = MeanPoolingSpec(),
    config: MeanPoolingConfig = MeanPoolingConfig(),
) -> tuple[Array, ...]:
    """The cotangent of x."""
    (x, segments), do = primals, cotangents.o
    (b, s, _), dtype = x.shape, np.promote_types(x.dtype, np.float32)
    if segments is None:
        return (jnp.broadcast_to((do.astype(dtype) / jnp.maximum(1, s)).astype(x.dtype), x.shape),)
    token, batch = jnp.arange(s), jnp.arange(b)[:, None]
    segments = jnp.broadcast_to(segments, (b, *segments.shape[1:]))
    number = jax.vmap(entries_until, (0, None))(segments[..., 1], token)
    inside = token[None] >= segments[batch, number.clip(max=segments.shape[1] - 1), 0]
    share = (do.astype(dtype) / _lengths(segments, dtype)).astype(x.dtype)
    dx = share.at[batch, number].get(mode="fill", fill_value=0)
    return (jnp.where(inside[..., None], dx, jnp.zeros((), x.dtype)),)


def _lengths(segments: Array, dtype: np.dtype) -> Array:
    """The number of tokens of each segment [b, n, 1], at least 1."""
    return jnp.maximum(segments[..., 1:] - segments[..., :1], 1).astype(dtype)
