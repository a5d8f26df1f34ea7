"""grouped_matmul in plain JAX: the formula, and its decomposition into tiles of rows of one group each.

With g the group of row i, and σ the scale of the columns of rhs, and without the rows of no group in any sum:

    o_i  = (lhs_i · rhs_g) σ_g                      dlhs_i = (do_i σ_g) · rhs_gᵀ
    drhs_g = Σ_{i∈g} lhs_iᵀ · do_i σ_g              dσ_g = Σ_{i∈g} do_i (lhs_i · rhs_g)
    ȯ_i  = (l̇hs_i · rhs_g + lhs_i · ṙhs_g) σ_g + (lhs_i · rhs_g) σ̇_g

The tiles are computed one by one, and each reads the matrix of its group in place: nothing of the size of all pairs of
rows and groups is ever stored.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.primitives.grouped_matmul import GroupedMatmulSpec, Operands, Outputs, result_dtype
from ejkernel.types import Target
from ejkernel.types.grouped_matmul import GroupedMatmulConfig
from ejkernel.xla_utils.groups import RowTiles, group_bounds, row_tiles
from ejkernel.xla_utils.symbolic import at_most

from .._registry import Backend, Platform, configured_by, kernel_registry
from ._tiles import varying_like


def reference(*operands, spec=GroupedMatmulSpec()) -> Outputs:
    """The formula: every row times every matrix, from which each row selects the product of its group.

    Products have the platform's precision for these dtypes. It is differentiable to any order.
    """
    x = Operands(*operands)
    (b, m, _), (_, e, _, n) = x.lhs.shape, x.rhs.shape
    bounds = group_bounds(x.group_sizes, x.group_offset, e, m)[..., None]
    row = jnp.arange(m, dtype=jnp.int32)[None, None]
    member = jnp.broadcast_to((row >= bounds[:, :-1]) & (row < bounds[:, 1:]), (b, e, m))[..., None]
    lhs = jnp.where(member.any(1), x.lhs, jnp.zeros((), x.lhs.dtype))
    products = jnp.einsum(
        "bmk,bekn->bemn",
        lhs,
        jnp.broadcast_to(x.rhs, (b, *x.rhs.shape[1:])).astype(lhs.dtype),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=_accumulator(lhs.dtype),
    )
    if x.rhs_scale is not None:
        products = products * jnp.broadcast_to(x.rhs_scale, (b, e, n))[:, :, None]
    o = jnp.where(member, products, jnp.zeros((), products.dtype)).sum(1).astype(result_dtype(lhs.dtype, spec))
    return Outputs(jnp.where(member.any(1), o, jnp.zeros((), o.dtype) if x.existing_out is None else x.existing_out))


# --- Configs ---------------------------------------------------------------------------------------------------------


def heuristic(spec: GroupedMatmulSpec, operands: Operands, target: Target) -> GroupedMatmulConfig:
    """Tiles of as many rows as a group has on average, from 16 to 512."""
    rows = operands.lhs.shape[1] // max(1, operands.rhs.shape[1])
    return GroupedMatmulConfig(block_m=min(512, max(16, 2 ** math.ceil(math.log2(max(1, rows))))))


def space(spec: GroupedMatmulSpec, operands: Operands, target: Target) -> list[GroupedMatmulConfig]:
    """Tiles of 64 to 512 rows; on a CPU, where timing them costs more than it can save, those of the heuristic."""
    if target.platform == "cpu":
        return [heuristic(spec, operands, target)]
    return [GroupedMatmulConfig(block_m=size) for size in (64, 128, 256, 512)]


# --- Implementations -------------------------------------------------------------------------------------------------


@kernel_registry.register("grouped_matmul", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@partial(jax.jit, static_argnames=("spec", "config"))
def grouped_matmul(
    *operands: Array | None,
    spec: GroupedMatmulSpec = GroupedMatmulSpec(),
    config: GroupedMatmulConfig = GroupedMatmulConfig(),
) -> Outputs:
    """o, tile by tile."""
    x = Operands(*operands)
    tiles = _tiles_of(x, config)

    def of_tile(at, lhs):
        return _scaled(_dot(lhs, _pick(x.rhs, at)), x.rhs_scale, at)

    return _outputs(_map_rows(of_tile, (x.lhs,), tiles), x.existing_out, x, tiles, spec)


@kernel_registry.register("grouped_matmul_jvp", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@partial(jax.jit, static_argnames=("spec", "config"))
def grouped_matmul_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: GroupedMatmulSpec = GroupedMatmulSpec(),
    config: GroupedMatmulConfig = GroupedMatmulConfig(),
) -> Outputs:
    """The tangent of o; a tangent of None is zero."""
    x, dx = primals, tangents
    tiles = _tiles_of(x, config)

    def of_tile(at, lhs, dlhs):
        rhs = _pick(x.rhs, at)
        terms = [] if dlhs is None else [_scaled(_dot(dlhs, rhs), x.rhs_scale, at)]
        if dx.rhs is not None:
            terms.append(_scaled(_dot(lhs, _pick(dx.rhs, at)), x.rhs_scale, at))
        if dx.rhs_scale is not None:
            terms.append(_scaled(_dot(lhs, rhs), dx.rhs_scale, at))
        return sum(terms)

    moves = any(t is not None for t in (dx.lhs, dx.rhs, dx.rhs_scale))
    do = _map_rows(of_tile, (x.lhs, dx.lhs), tiles) if moves else None
    return _outputs(do, dx.existing_out, x, tiles, spec)


@kernel_registry.register("grouped_matmul_bwd", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@partial(jax.jit, static_argnames=("wrt", "spec", "config"))
def grouped_matmul_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: GroupedMatmulSpec = GroupedMatmulSpec(),
    config: GroupedMatmulConfig = GroupedMatmulConfig(),
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt."""
    x, do = primals, cotangents.o
    tiles = _tiles_of(x, config)

    def of_rows(at, do):
        return _dot(_scaled(do, x.rhs_scale, at).astype(x.lhs.dtype), _pick(x.rhs, at), of_columns=True)

    found = _sum_groups(x, do, wrt, tiles)
    if "lhs" in wrt:
        found["lhs"] = _map_rows(of_rows, (do,), tiles)
    if "existing_out" in wrt:
        found["existing_out"] = jnp.where(_inside(tiles), jnp.zeros((), do.dtype), do)
    return tuple(found[name].astype(getattr(primals, name).dtype) for name in wrt)


def _sum_groups(x: Operands, do: Array, wrt: tuple[str, ...], tiles: RowTiles) -> dict[str, Array]:
    """Those cotangents of rhs and rhs_scale that `wrt` names, each summed over the tiles of a group."""
    wanted, dtype = [name for name in ("rhs", "rhs_scale") if name in wrt], _accumulator(x.lhs.dtype)
    if not wanted:
        return {}

    def step(totals, tile):
        at, (lhs, do) = tile
        parts = {}
        if "rhs" in wanted:
            rhs = _dot(lhs.T, do.astype(lhs.dtype))
            parts["rhs"] = _scaled(rhs, x.rhs_scale, at)
        if "rhs_scale" in wanted:
            columns = (_dot(lhs, _pick(x.rhs, at)) * do).sum(0)
            parts["rhs_scale"] = columns.sum(keepdims=True) if x.rhs_scale.shape[2] == 1 else columns
        return {name: totals[name].at[_index(totals[name], at)].add(part) for name, part in parts.items()}, None

    nothing = varying_like((x, do), {name: jnp.zeros(getattr(x, name).shape, dtype) for name in wanted})
    return lax.scan(step, nothing, _gathered((x.lhs, do.astype(dtype)), tiles))[0]


# --- Tiles -----------------------------------------------------------------------------------------------------------


def _tiles_of(x: Operands, config: GroupedMatmulConfig) -> RowTiles:
    """The tiles of every batch."""
    (b, m, _), e = x.lhs.shape, x.rhs.shape[1]
    bounds = group_bounds(x.group_sizes, x.group_offset, e, m)
    bounds = jnp.broadcast_to(bounds, (b, e + 1))
    return row_tiles(bounds[:, :-1], bounds[:, 1:], m, max(1, at_most(config.block_m, m)))


def _inside(tiles: RowTiles) -> Array:
    """[b, m, 1]: whether a row is in a group."""
    return (tiles.slot < tiles.rows.shape[1] * tiles.rows.shape[2])[..., None]


class _Place(NamedTuple):
    """The batch and group of a tile, and whether it has rows: the matrix of a group without rows may hold NaN."""

    batch: Array
    group: Array
    has_rows: Array


def _gathered(arrays: tuple[Array | None, ...], tiles: RowTiles) -> tuple[_Place, tuple]:
    """The place of each tile of all batches, and its rows of arrays [b, m, …], padded with 0."""
    (b, t, _), m = tiles.rows.shape, tiles.slot.shape[1]
    batch = jnp.broadcast_to(jnp.arange(b, dtype=jnp.int32)[:, None], (b, t))
    flat = lambda a: a.reshape(b * t, *a.shape[2:])
    take = lambda a: flat(a.at[batch[..., None], tiles.rows].get(mode="fill", fill_value=0))
    place = _Place(*map(flat, (batch, tiles.group, (tiles.rows < m).any(-1))))
    return place, tuple(None if a is None else take(a) for a in arrays)


def _map_rows(of_tile: Callable[..., Array], arrays: tuple[Array | None, ...], tiles: RowTiles) -> Array:
    """of_tile(its place, *its rows of arrays) of every tile, scattered to the rows [b, m, …]; 0 in rows of no group."""
    b, t, size = tiles.rows.shape
    _, parts = lax.scan(lambda _, tile: (None, of_tile(tile[0], *tile[1])), None, _gathered(arrays, tiles))
    parts = parts.reshape(b, t * size, parts.shape[-1])
    return parts.at[jnp.arange(b)[:, None], tiles.slot].get(mode="fill", fill_value=0)


def _outputs(o: Array | None, outside: Array | None, x: Operands, tiles: RowTiles, spec: GroupedMatmulSpec) -> Outputs:
    """o in its dtype, with `outside` in rows of no group, or 0 if that is None."""
    dtype = result_dtype(x.lhs.dtype, spec)
    o = jnp.zeros((), dtype) if o is None else o.astype(dtype)
    return Outputs(o if outside is None else jnp.where(_inside(tiles), o, outside))


# --- The parts of the formula ----------------------------------------------------------------------------------------


def _index(a: Array, at: _Place) -> tuple[Array, ...]:
    """(batch, group) in an array [b?, e?, …]."""
    return tuple(0 if size == 1 else i for size, i in zip(a.shape, (at.batch, at.group), strict=False))


def _pick(a: Array, at: _Place) -> Array:
    """a[batch, group]; 0 for a tile without rows, as the matrix may hold NaN."""
    return jnp.where(at.has_rows, a[_index(a, at)], jnp.zeros((), a.dtype))


def _scaled(x: Array, scale: Array | None, at: _Place) -> Array:
    return x if scale is None else x * _pick(scale, at)[None]


def _accumulator(dtype: np.dtype) -> np.dtype:
    return np.promote_types(dtype, np.float32)


def _dot(x: Array, rhs: Array, of_columns: bool = False) -> Array:
    """x · rhs or x · rhsᵀ in the precision of x, summed in float32.

    On a CPU 16 bits are multiplied as float32, which holds the products exactly: XLA cannot run some products of 16
    bits that vmap makes there, such as [m, k]ᵀ · [m, b, n].
    """
    product = partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1 if of_columns else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=_accumulator(x.dtype),
    )
    rhs = rhs.astype(x.dtype)
    if x.dtype.itemsize > 2:
        return product(x, rhs)
    widened = lambda *factors: product(*(factor.astype(jnp.float32) for factor in factors))
    return lax.platform_dependent(x, rhs, cpu=widened, default=product)
