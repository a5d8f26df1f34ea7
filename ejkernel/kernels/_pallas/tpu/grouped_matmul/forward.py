"""The kernel that multiplies the rows of each group by its matrix, which gives o, or by its transpose, for dlhs.

The grid is (tiles of columns, work items, tiles of features). The first work item of a tile of rows writes zeros to
rows outside of all groups, and every work item writes the rows of its group.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._grouped_matmul import tangent
from ejkernel.primitives.grouped_matmul import GroupedMatmulSpec, Operands, Outputs, result_dtype
from ejkernel.types.grouped_matmul import GroupedMatmulConfig
from ejkernel.xla_utils.groups import group_bounds

from .. import VMEM_BYTES
from .._work_list import (
    WorkItem,
    count_of,
    is_first_of_tile,
    item_at,
    largest_block,
    row_mask,
    segment_in_batch,
    work_list_of_all_tiles,
)


def grouped_matmul(*operands, spec: GroupedMatmulSpec, config: GroupedMatmulConfig) -> Outputs:
    """o, the rows of each group times its matrix."""
    x = Operands(*operands)
    return Outputs(multiply(x, spec.transpose_rhs, result_dtype(x.lhs.dtype, spec), config))


def grouped_matmul_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: GroupedMatmulSpec, config: GroupedMatmulConfig
) -> Outputs:
    """The tangent of o."""
    product = lambda x, dtype: multiply(x, spec.transpose_rhs, dtype, config)
    return Outputs(tangent(primals, tangents, product, result_dtype(primals.lhs.dtype, spec)))


def multiply(
    x: Operands, transposed: bool, dtype: Any, config: GroupedMatmulConfig, scaled_features: bool = False
) -> jax.Array:
    """x.lhs · x.rhs by groups; the matrices are stored as [n, k] if `transposed`."""
    (b, m, k), (_, e, _, n) = x.lhs.shape, x.rhs.shape
    rows, columns, depth = config.block_m, largest_block(n, config.block_n), largest_block(k, config.block_k)
    rhs = x.rhs.swapaxes(2, 3) if transposed else x.rhs
    bounds = jnp.broadcast_to(group_bounds(x.group_sizes, x.group_offset, e, m), (b, e + 1))
    items = work_list_of_all_tiles(bounds, m, rows)

    def of_rows(j, step, i, items):
        item = item_at(items, step)
        return item.batch, item.tile, j

    def of_features(j, step, i, items):
        item = item_at(items, step)
        return item.batch, item.tile, i

    def of_matrix(j, step, i, items):
        return *_owner(x.rhs, item_at(items, step), e), *((j, i) if transposed else (i, j))

    def of_scale(j, step, i, items):
        return *_owner(x.rhs_scale, item_at(items, step), e), 0, i if scaled_features else j

    scale = None if x.rhs_scale is None else wide(x.rhs_scale, k if scaled_features else n)
    operands = {
        "lhs": (x.lhs, pl.BlockSpec((None, rows, depth), of_features)),
        "rhs": (rhs, pl.BlockSpec((None, None, *((columns, depth) if transposed else (depth, columns))), of_matrix)),
        "existing_out": (x.existing_out, pl.BlockSpec((None, rows, columns), of_rows)),
        "scale": (scale, pl.BlockSpec((None, None, 1, depth if scaled_features else columns), of_scale)),
    }
    given = {name: operand for name, operand in operands.items() if operand[0] is not None}
    return pl.pallas_call(
        partial(_kernel, names=tuple(given), transposed=transposed, scaled_features=scaled_features),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(n, columns), count_of(items), k // depth),
            in_specs=[spec for _, spec in given.values()],
            out_specs=pl.BlockSpec((None, rows, columns), of_rows),
            scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((b, m, n), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * b * m * k * n,
            transcendentals=0,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a, _ in given.values()) + b * m * n * dtype.itemsize,
        ),
        name="grouped_matmul_rows",
    )(items, *(array for array, _ in given.values()))


def wide(scale: jax.Array, columns: int) -> jax.Array:
    """[b?, e?, 1, columns]."""
    return jnp.broadcast_to(scale, (*scale.shape[:2], columns))[:, :, None]


def _owner(of: jax.Array, item: WorkItem, groups: int) -> tuple[Any, Any]:
    """Batch and group of the matrix, or the scale, that a work item needs."""
    group = segment_in_batch(item, groups)
    return (item.batch if of.shape[0] > 1 else 0), (group if of.shape[1] > 1 else 0)


def _kernel(items, *refs, names: tuple[str, ...], transposed: bool, scaled_features: bool):
    given, (o, total) = dict(zip(names, refs, strict=False)), refs[len(names) :]
    lhs, rhs, scale = given["lhs"], given["rhs"], given.get("scale")
    step, feature = pl.program_id(1), pl.program_id(2)
    item = item_at(items, step)

    @pl.when(is_first_of_tile(items, step) & (feature == 0))
    def _():
        o[...] = given["existing_out"][...] if "existing_out" in given else jnp.zeros_like(o)

    @pl.when(feature == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(item.start < item.end)
    def _():
        x = lhs[...]
        if scale is not None and scaled_features:
            x = (x * scale[...]).astype(x.dtype)
        total[...] += dot(x, rhs[...].astype(x.dtype), (1, 1 if transposed else 0))

    @pl.when(feature == pl.num_programs(2) - 1)
    def _():
        product = total[...]
        if scale is not None and not scaled_features:
            product = product * scale[...]
        o[...] = jnp.where(row_mask(item, o.shape[0]), product.astype(o.dtype), o[...])


def dot(x: jax.Array, y: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """The product in float32; float32 operands are multiplied in full precision."""
    if y.shape[1 - contracted[1]] == 1:  # Mosaic multiplies by one column in the operands' dtype, and sums in float32
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (tuple((axis,) for axis in contracted), ((), ()))
    return jax.lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)
