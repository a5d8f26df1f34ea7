"""The backward: dlhs by the kernel of the forward, and the kernel that multiplies the rows of a group with each other.

    dlhs_i = (do_i σ_g) · rhs_gᵀ        drhs_g = (Σ_{i∈g} lhs_iᵀ · do_i) σ_g        dσ_g = Σ_k rhs_g ∘ (drhs_g / σ_g)

A program computes one tile of one matrix of drhs, and loops over the rows of its group: those of all batches that share
the matrix, one batch after the other. No two programs add to one number, so that every run gives the same bits, and a
group without rows gets its zeros.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._grouped_matmul import outside, scale_cotangent
from ejkernel.kernels._triton import _launch
from ejkernel.primitives.grouped_matmul import GroupedMatmulSpec, Operands, Outputs
from ejkernel.types.grouped_matmul import GroupedMatmulConfig

from . import tiles
from .forward import BAND, multiply
from .problem import in_memory, problem_of


def grouped_matmul_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: GroupedMatmulSpec,
    config: GroupedMatmulConfig,
) -> tuple:
    """The cotangents of the operands that `wrt` names, in that order."""
    x, do, found = primals, cotangents.o, {}
    narrow = do.astype(x.lhs.dtype)
    if "lhs" in wrt:
        product = x._replace(lhs=narrow, rhs=x.rhs.swapaxes(2, 3), existing_out=None)
        problem = problem_of(product, x.lhs.dtype, not spec.transpose_rhs, scaled_features=True)
        found["lhs"] = multiply(product, problem, x.lhs.dtype, config)
    if "rhs" in wrt:
        found["rhs"] = _matrices(x, narrow, x.rhs.dtype, spec, config)
    if "rhs_scale" in wrt:
        unscaled = x._replace(rhs_scale=None)
        found["rhs_scale"] = scale_cotangent(x, do, lambda do: _matrices(unscaled, do, jnp.float32, spec, config))
    if "existing_out" in wrt:
        found["existing_out"] = outside(do, x)
    return tuple(found[name].astype(getattr(primals, name).dtype) for name in wrt)


def _matrices(x: Operands, do: jax.Array, dtype, spec: GroupedMatmulSpec, config: GroupedMatmulConfig) -> jax.Array:
    """drhs [b?, e, k, n]."""
    problem = problem_of(x, dtype, spec.transpose_rhs)
    shape = jax.eval_shape(lambda rhs: in_memory(rhs, problem.transposed), x.rhs).shape
    lhs, do = x.lhs.reshape(-1, problem.K), do.reshape(-1, problem.N)
    rows, columns, depth = config.block_m, config.block_n, config.block_k
    if problem.described:
        lhs, do = _launch.described(lhs, (depth, rows)), _launch.described(do, (depth, columns))
    drhs = _launch.launch(
        groups_kernel,
        lhs,
        do,
        x.group_sizes,
        x.group_offset,
        x.rhs_scale,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        grid=shape[0] * problem.E * triton.cdiv(problem.K, rows) * triton.cdiv(problem.N, columns),
        config=config,
        problem=problem,
        BLOCK_M=rows,
        BLOCK_N=columns,
        BLOCK_K=depth,
        BAND=BAND,
    )
    return in_memory(drhs, problem.transposed)


@triton.jit
def groups_kernel(
    lhs, do, group_sizes, group_offset, rhs_scale,
    drhs,
    problem: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):  # fmt: skip
    row_tiles: tl.constexpr = (problem.K + BLOCK_M - 1) // BLOCK_M
    column_tiles: tl.constexpr = (problem.N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) % (row_tiles * column_tiles)
    matrix_index = tl.program_id(0) // (row_tiles * column_tiles)
    k, n = tiles.in_bands(tile, row_tiles, column_tiles, BAND)
    k, n = k * BLOCK_M, n * BLOCK_N
    local_group, first_batch = matrix_index % problem.E, matrix_index // problem.E

    total, rows_in_all = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), 0
    for batch in range(first_batch, first_batch + problem.shared):
        start, end = tiles.rows_of_group(group_sizes, group_offset, batch, local_group, problem)
        rows_in_all += end - start
        start, end = batch * problem.M + start, batch * problem.M + end
        whole = start + (end - start) // BLOCK_K * BLOCK_K
        for row in tl.range(start, whole, BLOCK_K):
            x = tiles.load_rows(lhs, row, end, k, problem.K, BLOCK_K, BLOCK_M, problem.described)
            y = tiles.load_rows(do, row, end, n, problem.N, BLOCK_K, BLOCK_N, problem.described)
            total = tiles.add_product(total, x.T, y, problem)
        # The last rows, with those before them in a tile: what is masked is of the same group then. A group of less
        # than a tile has neighbours in it, which may be NaN, so that both factors are masked.
        if whole < end and end - start >= BLOCK_K:
            total = add_rows(total, lhs, do, end - BLOCK_K, whole, end, k, n, problem, BLOCK_M, BLOCK_N, BLOCK_K, False)
        elif whole < end:
            total = add_rows(total, lhs, do, start, start, end, k, n, problem, BLOCK_M, BLOCK_N, BLOCK_K, True)

    if rhs_scale is not None and rows_in_all > 0:  # the scale of an empty group may be NaN
        total *= tiles.load_scale(rhs_scale, first_batch, local_group, n, problem.N, problem, BLOCK_N)
    rows, columns = (k + tl.arange(0, BLOCK_M))[:, None], (n + tl.arange(0, BLOCK_N))[None, :]
    row_step: tl.constexpr = 1 if problem.transposed else problem.N
    column_step: tl.constexpr = problem.K if problem.transposed else 1
    drhs += matrix_index.to(tl.int64) * problem.K * problem.N
    tl.store(
        drhs + rows.to(tl.int64) * row_step + columns.to(tl.int64) * column_step,
        total.to(drhs.dtype.element_ty),
        mask=(rows < problem.K) & (columns < problem.N),
    )


@triton.jit
def add_rows(
    total, lhs, do, row, start, end, k, n, problem: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """total + Σ lhsᵀ · do over the rows from `start` to `end` of the tile that begins with `row`."""
    rows = row + tl.arange(0, BLOCK_K)[:, None]
    inside = (rows >= start) & (rows < end)
    x = tiles.load_rows(lhs, row, end, k, problem.K, BLOCK_K, BLOCK_M, problem.described)
    y = tiles.load_rows(do, row, end, n, problem.N, BLOCK_K, BLOCK_N, problem.described)
    x = tl.where(inside, x, 0.0)
    if BOTH:
        y = tl.where(inside, y, 0.0)
    return tiles.add_product(total, x.T, y, problem)
