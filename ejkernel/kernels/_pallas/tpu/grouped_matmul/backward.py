"""The backward: dlhs by the kernel of the forward, and the kernel of drhs, which sums over the rows of a group.

    dlhs_i = (do_i σ_g) · rhs_gᵀ        drhs_g = Σ_{i∈g} lhs_iᵀ · (do_i σ_g)

The grid of the latter is (tiles of features, tiles of columns, work items), where the work items of a matrix, from all
batch elements that share it, are consecutive. A group without rows has one work item, which writes zeros.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._grouped_matmul import outside, scale_cotangent
from ejkernel.primitives.grouped_matmul import GroupedMatmulSpec, Operands, Outputs
from ejkernel.types.grouped_matmul import GroupedMatmulConfig
from ejkernel.xla_utils.groups import group_bounds

from .._work_list import (
    WorkItem,
    is_first,
    is_last,
    item_at,
    largest_block,
    most_work_items,
    row_mask,
    work_list,
)
from .forward import VMEM_BYTES, dot, multiply, wide


def grouped_matmul_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: GroupedMatmulSpec,
    config: GroupedMatmulConfig,
) -> tuple[jax.Array, ...]:
    """The cotangents of the operands named in `wrt`, in that order."""
    x, do, found = primals, cotangents.o, {}
    narrow = do.astype(x.lhs.dtype)
    if "lhs" in wrt:
        product = x._replace(lhs=narrow, rhs=x.rhs.swapaxes(2, 3), existing_out=None)
        found["lhs"] = multiply(product, not spec.transpose_rhs, x.lhs.dtype, config, scaled_features=True)
    if "rhs" in wrt:
        found["rhs"] = _matrices(x, narrow, x.rhs.dtype, spec, config)
    if "rhs_scale" in wrt:
        unscaled, wide = x._replace(rhs_scale=None), jnp.dtype(jnp.float32)
        found["rhs_scale"] = scale_cotangent(x, do, lambda do: _matrices(unscaled, do, wide, spec, config))
    if "existing_out" in wrt:
        found["existing_out"] = outside(do, x)
    return tuple(found[name].astype(getattr(primals, name).dtype) for name in wrt)


def _matrices(
    x: Operands, do: jax.Array, dtype: Any, spec: GroupedMatmulSpec, config: GroupedMatmulConfig
) -> jax.Array:
    """drhs [b?, e, k, n]."""
    (b, m, k), (own, e, _, n), transposed = x.lhs.shape, x.rhs.shape, spec.transpose_rhs
    rows, depth, columns = config.block_m, largest_block(k, config.block_k), largest_block(n, config.block_n)
    count = b * most_work_items(m, rows, e)
    items = _work_list(x, rows, count)

    def of_features(i, j, step, items):
        item = item_at(items, step)
        return item.batch, item.tile, i

    def of_columns(i, j, step, items):
        item = item_at(items, step)
        return item.batch, item.tile, j

    def of_matrix(i, j, step, items):
        batch, group = _owner(items, step, b, own, e)
        return batch, group, *((j, i) if transposed else (i, j))

    def of_scale(i, j, step, items):
        batch, group = _owner(items, step, b, own, e)
        return (batch if x.rhs_scale.shape[0] > 1 else 0), (group if x.rhs_scale.shape[1] > 1 else 0), 0, j

    arrays = [x.lhs, do] + ([] if x.rhs_scale is None else [wide(x.rhs_scale, n)])
    specs = [
        pl.BlockSpec((None, rows, depth), of_features),
        pl.BlockSpec((None, rows, columns), of_columns),
        pl.BlockSpec((None, None, 1, columns), of_scale),
    ]
    tile = (columns, depth) if transposed else (depth, columns)
    drhs = pl.pallas_call(
        partial(_kernel, key=lambda item: _matrix_of(item, b, own), transposed=transposed),
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
    )(items, *arrays)
    return drhs.swapaxes(2, 3) if transposed else drhs


def _work_list(x: Operands, rows: int, count: int) -> jax.Array:
    """The work list, matrix by matrix: the rows of its group in its batch element, or in all of them in order."""
    (b, m, _), (own, e, _, _) = x.lhs.shape, x.rhs.shape
    bounds = jnp.broadcast_to(group_bounds(x.group_sizes, x.group_offset, e, m), (b, e + 1))
    batch = jnp.broadcast_to(jnp.arange(b, dtype=jnp.int32)[:, None], (b, e))
    in_order = lambda a: (a if own > 1 or b == 1 else a.T).reshape(-1)
    return work_list(in_order(batch), in_order(bounds[:, :-1]), in_order(bounds[:, 1:]), rows, count, at_least=1)


def _matrix_of(item: WorkItem, b: int, own: int) -> Any:
    """The number of the matrix to which a work item of `_work_list` adds."""
    return item.segment if own > 1 or b == 1 else jax.lax.div(item.segment, b)


def _owner(items: Any, step: Any, b: int, own: int, e: int) -> tuple[Any, Any]:
    """Batch and group of that matrix."""
    matrix = _matrix_of(item_at(items, step), b, own)
    return jax.lax.div(matrix, e), jax.lax.rem(matrix, e)


def _kernel(items, lhs, do, *refs, key, transposed: bool):
    *scale, drhs, total = refs
    step = pl.program_id(2)
    item = item_at(items, step)

    @pl.when(is_first(items, step, key))
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(item.start < item.end)
    def _():
        inside = row_mask(item, lhs.shape[0])
        x, y = jnp.where(inside, lhs[...], 0), jnp.where(inside, do[...], 0)
        if scale:
            y = (y * scale[0][...]).astype(x.dtype)
        total[...] += dot(y, x, (0, 0)) if transposed else dot(x, y, (0, 0))

    @pl.when(is_last(items, step, key))
    def _():
        drhs[...] = total[...].astype(drhs.dtype)
