"""A step of serving over quantised pages: XLA rotates the queries and the results, the kernel does all between."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._xla._pages import over_batch
from ejkernel.kernels._xla._turboquant import matrices_of
from ejkernel.primitives._pages import CacheSpec
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig
from ejkernel.xla_utils.turboquant import Matrices, Quantised, product, rotated_queries

from .._paged import LANES
from .._paged.problem import Problem
from .._paged.ragged import Queries, over_step, step_of
from .._paged.tiles import tile_of_sinks, tiles_of, tokens_of
from .._paged.work import listed
from . import PARTS, parts_of_values
from .codes import code_order, sign_order, split, table_of
from .kernel import Inputs, attend
from .pool import Pool, stored


def attention(
    x: Any, pools: Quantised, spec: CacheSpec, config: RaggedPageAttentionConfig, name: str
) -> tuple[Array, Array]:
    """o [b,t,h,d] and lse [b,t,h] of the queries among the operands x over pools, as `pool.stored` gives them.

    `name` is the name of the kernels.
    """
    (_, t, h, d), (_, _, size, g) = x.q.shape, x.value_norms_pages.shape
    group, columns, of_values = h // g, x.block_tables.shape[2], parts_of_values(x.q.dtype)
    layouts = _layouts(x, config.pages_per_block * (size // LANES))
    matrices = matrices_of(x)
    tables = tuple(
        jax.vmap(partial(table_of, parts=parts))(book)
        for book, parts in ((matrices.key_codebook, PARTS), (matrices.value_codebook, of_values))
    )
    table = x.block_tables.reshape(-1)

    def over(queries: Queries, tokens: int, kind: str, **fields: Any) -> list[Array]:
        """Π·o in parts, and lse, of rotated queries [n,h,·] in tiles of `tokens` tokens."""
        problem = Problem(spec, layouts, group, tokens, columns, x.value_norms_pages.shape[1], size // LANES)
        tiles = jnp.concatenate(split(tiles_of(queries.q, g, tokens), PARTS), axis=2)
        of_both = tiles[..., : PARTS * d], tiles[..., PARTS * d :]
        given = Inputs(of_both, tuple(pools), tables, tile_of_sinks(x.sinks, g, tokens))
        found = attend(listed(problem.keys, **fields), table, given, d, problem, f"{name}_{kind}")
        return [tokens_of(a, queries.q.shape[0], group, tokens) for a in found]

    q = over_batch(lambda of: _rotated(*of, spec.softmax_scale), (x.q, matrices))
    step = step_of(x, t, size, spec)
    o, lse = over_step(Queries(q, None), step, config.queries_per_block, over)
    return over_batch(lambda of: _rotated_back(*of, of_values), (o, matrices)).astype(x.q.dtype), lse


def _layouts(x: Any, pieces: int) -> tuple[Pool, ...]:
    """The layouts of the pools for blocks of `pieces` pieces."""

    def layout(pool: Array) -> Pool:
        batch, count, size, *rows = pool.shape
        of_page = size // LANES
        return Pool(pieces, tuple(rows), pool.dtype, of_page, count * of_page if batch > 1 else 0)

    return tuple(layout(getattr(x, f"{name}_pages")) for name in Quantised._fields)


def stored_pools(x: Any) -> Quantised:
    """The pools among the operands x, as the kernels take them."""
    return Quantised(*(stored(getattr(x, f"{name}_pages")) for name in Quantised._fields))


def in_pages(x: Any, pools: Quantised) -> Quantised:
    """The pools in the shapes of the operands."""
    shapes = [getattr(x, f"{name}_pages").shape for name in Quantised._fields]
    return Quantised(*(jnp.moveaxis(pool, -1, 1).reshape(of) for pool, of in zip(pools, shapes, strict=True)))


def _rotated(q: Array, by: Matrices, scale: float) -> Array:
    """Queries [t,h,d], times the scale of the logits, as [t,h,3·d + e] for products with codes and signs."""
    d, e = q.shape[-1], by.qjl_projection.shape[0]
    of_signs = rotated_queries(q, by._replace(qjl_projection=by.qjl_projection[sign_order(e)]))[..., d:]
    of_codes = product(q.astype(jnp.float32), by.rotation_matrix[code_order(d, PARTS)].T)
    return jnp.concatenate([of_codes, of_signs], -1) * jnp.float32(scale)


def _rotated_back(o: Array, by: Matrices, parts: int) -> Array:
    """o [t,h,d] of the sums [t,h,parts·d] over the parts of the rotated values."""
    return product(o, by.rotation_matrix[code_order(by.rotation_matrix.shape[0], parts)])
