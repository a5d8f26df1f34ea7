"""The kernel of native_sparse_blocks: a tile of neighbouring queries, with all heads of their group, over mean keys.

With c_x the mean key of block x, over the blocks that end at or before query i:

    p_ihx = exp(scale · q_ih·c_x) / Σ_x' exp(scale · q_ih·c_x')        score_ix = Σ_h p_ihx, over the heads h of a group

The logits of a tile stay in vector memory, so that they are computed once; all of them together never exist. Chunks of
mean keys that no query of the tile sees are left out. The best scores are then taken one after the other. Mean keys of
bfloat16 are two numbers, the second what the first leaves, so that a logit is as exact as one of 17 bits.
"""

from dataclasses import dataclass
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.primitives.native_sparse_blocks import NativeSparseBlocksSpec, Operands
from ejkernel.xla_utils.parts import parts_of
from ejkernel.xla_utils.sequence_blocks import ended_blocks, mean_keys, places

from .. import VMEM_BYTES
from .configs import CHUNK, LANES, padded_heads, slots_of

HIDDEN = -1e30
"""The logit of a block that a query does not see."""
# The columns of limits: the first slot of a query's sequence, the blocks that have ended, and its own block or −1.
BEFORE, ENDED, OWN = range(3)


@dataclass(frozen=True)
class Problem:
    """The shapes and options of one call.

    Attributes:
        queries: of a tile.
        heads, padded: of a group, and the rows that they take.
        count: blocks of a list.
        scale: the factor of products.
    """

    queries: int
    heads: int
    padded: int
    count: int
    scale: float

    @property
    def rows(self) -> int:
        """Of a tile."""
        return self.queries * self.padded


def selected(x: Operands, spec: NativeSparseBlocksSpec, queries: int) -> Array:
    """The lists of blocks [b,s,g,n]."""
    (B, S, H, D), G, slots = x.q.shape, x.k.shape[2], slots_of(x, spec)
    problem = Problem(queries, H // G, padded_heads(x), x.ranks.shape[1], spec.softmax_scale)
    cuts = None if x.cu_seqlens is None else jnp.broadcast_to(x.cu_seqlens, (B, x.cu_seqlens.shape[1]))
    of_batch = jax.vmap(partial(_limits_and_means, spec=spec, queries=S), (0, None if cuts is None else 0))
    limits, means = of_batch(x.k, cuts)
    beyond = -S % queries
    limits = jnp.pad(limits, ((0, 0), (0, beyond), (0, 0)), constant_values=-1)
    means = jnp.pad(jnp.moveaxis(means, 2, 1), ((0, 0), (0, 0), (0, slots - means.shape[1]), (0, 0)))
    parts = parts_of(means, x.q.dtype)
    q = x.q.reshape(B, S, G, problem.heads, D)
    q = jnp.pad(q, ((0, 0), (0, beyond), (0, 0), (0, problem.padded - problem.heads), (0, 0)))
    tiles = (S + beyond) // queries
    of_means = pl.BlockSpec((1, 1, slots, D), lambda b, g, i, _: (b, g, 0, 0))
    lists = pl.pallas_call(
        partial(_kernel, problem=problem),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, G, tiles),
            in_specs=[
                pl.BlockSpec((1, queries, limits.shape[2]), lambda b, g, i, _: (b, i, 0)),
                pl.BlockSpec((1, queries, problem.padded, D), lambda b, g, i, _: (b, i, g, 0)),
                *(of_means for _ in parts),
            ],
            out_specs=pl.BlockSpec((1, 1, queries, problem.count), lambda b, g, i, _: (b, g, i, 0)),
            scratch_shapes=[
                pltpu.VMEM((problem.rows, slots), jnp.float32),
                pltpu.VMEM((queries, slots), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((B, G, S + beyond, problem.count), jnp.int32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel"), vmem_limit_bytes=VMEM_BYTES
        ),
        name="native_sparse_blocks",
    )(_chunks(limits, tiles), limits, q.reshape(B, S + beyond, -1, D), *parts)
    return jnp.moveaxis(lists[:, :, :S], 1, 2)


def _limits_and_means(k: Array, cuts: Array | None, *, spec: NativeSparseBlocksSpec, queries: int):
    """What each query sees [s,3], and the mean keys [slots,g,d] in float32; those that no query reads may be NaN."""
    keys, size = k.shape[0], spec.block_size
    place, before = places(cuts, queries, keys), jnp.zeros((queries,), jnp.int32)
    if cuts is not None:
        before = ended_blocks(cuts, keys, size).before[place.sequence]
    own = jnp.where(place.stop > 0, (place.stop - 1) // size, -1)
    return jnp.stack([before, place.stop // size, own], 1), mean_keys(k, cuts, size)


def _chunks(limits: Array, tiles: int) -> Array:
    """The first chunk of mean keys that some query of a tile sees, and the one after the last, [b · tiles · 2] int32:
    one axis, as scalar memory pads the last one to 128.
    """
    of_tile = limits.reshape(limits.shape[0], tiles, -1, limits.shape[2])
    before, ended = of_tile[..., BEFORE], of_tile[..., ENDED]
    end = jnp.where(ended > 0, before + ended, 0).max(2)
    first = jnp.where(ended > 0, before, jnp.iinfo(jnp.int32).max).min(2)
    return jnp.stack([jnp.minimum(first, end) // CHUNK, -(-end // CHUNK)], 2).reshape(-1)


def _kernel(chunks, limits, q, *refs, problem: Problem):
    *means, lists, logits, scores = refs
    tile = pl.program_id(0) * pl.num_programs(2) + pl.program_id(2)
    first, end = chunks[2 * tile], chunks[2 * tile + 1]
    before, ended, own = (limits[0, :, column : column + 1] for column in range(3))
    shape, of_rows = (problem.queries, problem.padded, CHUNK), q[0].reshape(problem.rows, q.shape[3])

    def numbers(chunk):
        """The blocks of a chunk, as numbers in the sequence of each query."""
        return chunk * CHUNK + lax.broadcasted_iota(jnp.int32, (problem.queries, CHUNK), 1) - before

    def of_chunk(chunk):
        return pl.ds(pl.multiple_of(chunk * CHUNK, CHUNK), CHUNK)

    def multiply(chunk, most):
        s = sum(_product(of_rows, part[0, 0, of_chunk(chunk)]) for part in means) * problem.scale
        x = numbers(chunk)
        sees = jnp.where((x >= 0) & (x < ended), 1.0, 0.0)
        sees = lax.broadcast_in_dim(sees, shape, (0, 2)).reshape(problem.rows, CHUNK)
        s = jnp.where(sees > 0, s, HIDDEN)
        logits[:, of_chunk(chunk)] = s
        return reduce(jnp.maximum, _columns(s), most)

    # Maxima and sums of every 128th number, which are reduced over lanes once, at the end.
    of_lanes = partial(jnp.full, (problem.rows, LANES), dtype=jnp.float32)
    most = lax.fori_loop(first, end, multiply, of_lanes(HIDDEN)).max(1, keepdims=True)
    weights = lambda chunk: jnp.exp(logits[:, of_chunk(chunk)] - most)
    add = lambda chunk, total: reduce(jnp.add, _columns(weights(chunk)), total)
    total = lax.fori_loop(first, end, add, of_lanes(0.0)).sum(1, keepdims=True)
    head = lax.broadcasted_iota(jnp.int32, (problem.queries, problem.padded, 1), 1).reshape(problem.rows, 1)
    share = jnp.where(head < problem.heads, 1 / jnp.where(total > 0, total, 1.0), 0.0)
    scores[...] = jnp.full(scores.shape, -1.0)

    def score(chunk, _):
        x = numbers(chunk)
        # Its own block and the first are in the list anyway; the own one may have ended with its query.
        is_open = (x > 0) & (x < jnp.minimum(ended, own))
        found = (weights(chunk) * share).reshape(shape).sum(1)
        scores[:, of_chunk(chunk)] = jnp.where(is_open, found, -1.0)

    lax.fori_loop(first, end, score, None)
    lists[0, 0] = _best(scores[...], before, own, problem.count)


def _columns(x: Array) -> list[Array]:
    """The registers of each row of x, side by side."""
    return [x[:, start : start + LANES] for start in range(0, x.shape[1], LANES)]


def _product(q: Array, means: Array) -> Array:
    """q·cᵀ in float32."""
    precision = lax.Precision.HIGHEST if q.dtype == np.float32 else None
    return lax.dot_general(q, means, (((1,), (1,)), ((), ())), precision, jnp.float32)


def _best(scores: Array, before: Array, own: Array, count: int) -> Array:
    """The lists [queries, count] from scores [queries, slots], which are negative where there is no block to take."""
    slot = lax.broadcasted_iota(jnp.int32, scores.shape, 1).astype(jnp.float32)
    column = lax.broadcasted_iota(jnp.int32, (scores.shape[0], count), 1)
    lists = jnp.where(column == 0, own, jnp.where((column == 1) & (own > 0), 0, -1))

    def take(n, carry):
        scores, lists = carry
        best = scores.max(1, keepdims=True)
        place = jnp.where(scores == best, slot, float(scores.shape[1])).min(1, keepdims=True)
        found = jnp.where(best >= 0, place.astype(jnp.int32) - before, -1)
        return jnp.where(slot == place, -1.0, scores), jnp.where(column == n, found, lists)

    return lax.fori_loop(2, max(2, count), take, (scores, lists))[1]
