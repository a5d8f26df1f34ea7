"""The backward: dlhs by the kernel of the forward, and the kernel that multiplies the rows of a group with each other.

    dlhs_i = (do_i σ_g) · rhs_gᵀ        drhs_g = Σ_{i∈g} lhs_iᵀ · (do_i σ_g)

Its grid is (tiles of features, tiles of columns, visits), where the visits of a matrix follow one another: those of all
batches that share it. A group without rows has one visit, for its zeros.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._grouped_matmul import outside, scale_cotangent
from ejkernel.primitives.grouped_matmul import GroupedMatmulSpec, Operands, Outputs
from ejkernel.types import KernelConfig
from ejkernel.xla_utils.groups import group_bounds

from .. import _visits
from .._visits import rows_inside
from .forward import VMEM_BYTES, dot, multiply, wide


def grouped_matmul_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: GroupedMatmulSpec,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    """The cotangents of the operands that `wrt` names, in that order."""
    x, do, found = primals, cotangents.o, {}
    narrow = do.astype(x.lhs.dtype)
    if "lhs" in wrt:
        product = x._replace(lhs=narrow, rhs=x.rhs.swapaxes(2, 3), existing_out=None)
        found["lhs"] = multiply(product, not spec.transpose_rhs, x.lhs.dtype, config, scaled_features=True)
    if "rhs_scale" in wrt:
        unscaled = _matrices(x._replace(rhs_scale=None), narrow, jnp.dtype(jnp.float32), spec, config)
        found["rhs_scale"] = scale_cotangent(x, unscaled)
    if "rhs" in wrt:
        found["rhs"] = _matrices(x, narrow, x.rhs.dtype, spec, config)
    if "existing_out" in wrt:
        found["existing_out"] = outside(do, x)
    return tuple(found[name].astype(getattr(primals, name).dtype) for name in wrt)


def _matrices(x: Operands, do: jax.Array, dtype: Any, spec: GroupedMatmulSpec, config: KernelConfig) -> jax.Array:
    """drhs [b?, e, k, n]."""
    (b, m, k), (own, e, _, n), transposed = x.lhs.shape, x.rhs.shape, spec.transpose_rhs
    rows, depth, columns = config.block_q, _visits.cut(k, config.block_d), _visits.cut(n, config.block_k)
    count = b * _visits.most_visits(m, rows, e)
    table = _table(x, rows, count)

    def of_features(i, j, v, table):
        visit = _visits.at(table, v)
        return visit.batch, visit.tile, i

    def of_columns(i, j, v, table):
        visit = _visits.at(table, v)
        return visit.batch, visit.tile, j

    def of_matrix(i, j, v, table):
        batch, group = _owner(table, v, b, own, e)
        return batch, group, *((j, i) if transposed else (i, j))

    def of_scale(i, j, v, table):
        batch, group = _owner(table, v, b, own, e)
        return (batch if x.rhs_scale.shape[0] > 1 else 0), (group if x.rhs_scale.shape[1] > 1 else 0), 0, j

    arrays = [x.lhs, do] + ([] if x.rhs_scale is None else [wide(x.rhs_scale, n)])
    specs = [
        pl.BlockSpec((None, rows, depth), of_features),
        pl.BlockSpec((None, rows, columns), of_columns),
        pl.BlockSpec((None, None, 1, columns), of_scale),
    ]
    tile = (columns, depth) if transposed else (depth, columns)
    drhs = pl.pallas_call(
        partial(_kernel, same=lambda v: _matrix_of(v, b, own), transposed=transposed),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(k // depth, pl.cdiv(n, columns), count),
            in_specs=specs[: len(arrays)],
            out_specs=pl.BlockSpec((None, None, *tile), of_matrix),
            scratch_shapes=[pltpu.VMEM(tile, jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((own, e, *((n, k) if transposed else (k, n))), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * b * m * k * n,
            transcendentals=0,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in arrays) + x.rhs.size * dtype.itemsize,
        ),
        name="grouped_matmul_matrices",
    )(table, *arrays)
    return drhs.swapaxes(2, 3) if transposed else drhs


def _table(x: Operands, rows: int, count: int) -> jax.Array:
    """The visits of each matrix: of the rows of its group in its batch, or in one batch after the other."""
    (b, m, _), (own, e, _, _) = x.lhs.shape, x.rhs.shape
    bounds = jnp.broadcast_to(group_bounds(x.group_sizes, x.group_offset, e, m), (b, e + 1))
    batch = jnp.broadcast_to(jnp.arange(b, dtype=jnp.int32)[:, None], (b, e))
    in_order = lambda a: (a if own > 1 or b == 1 else a.T).reshape(-1)
    return _visits.visits(in_order(batch), in_order(bounds[:, :-1]), in_order(bounds[:, 1:]), rows, count, at_least=1)


def _matrix_of(visit: _visits.Visits, b: int, own: int) -> Any:
    """The number of the matrix that a segment of `_table` adds to."""
    return visit.segment if own > 1 or b == 1 else jax.lax.div(visit.segment, b)


def _owner(table: Any, v: Any, b: int, own: int, e: int) -> tuple[Any, Any]:
    """Batch and group of that matrix."""
    matrix = _matrix_of(_visits.at(table, v), b, own)
    return jax.lax.div(matrix, e), jax.lax.rem(matrix, e)


def _kernel(table, lhs, do, *refs, same, transposed: bool):
    *scale, drhs, total = refs
    number = pl.program_id(2)
    visit = _visits.at(table, number)

    @pl.when(_visits.begins(table, number, same))
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(visit.start < visit.end)
    def _():
        inside = rows_inside(visit, lhs.shape[0])
        x, y = jnp.where(inside, lhs[...], 0), jnp.where(inside, do[...], 0)
        if scale:
            y = (y * scale[0][...]).astype(x.dtype)
        total[...] += dot(y, x, (0, 0)) if transposed else dot(x, y, (0, 0))

    @pl.when(_visits.ends(table, number, same))
    def _():
        drhs[...] = total[...].astype(drhs.dtype)
