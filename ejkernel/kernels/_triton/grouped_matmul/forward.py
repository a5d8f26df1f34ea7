"""The kernel that multiplies the rows of each group by its matrix: o, and by the matrices transposed dlhs.

A fixed number of programs share the tiles of the result. Every program reads the sizes of the groups and so knows how
many tiles each group has; tiles are numbered group by group, the rows of no group come last, and program p computes the
tiles p, p + programs, and so on. Nothing about the groups is known to the host.
"""

import jax
import triton
import triton.language as tl

from ejkernel.kernels._grouped_matmul import tangent
from ejkernel.kernels._triton import _launch
from ejkernel.primitives.grouped_matmul import GroupedMatmulSpec, Operands, Outputs, result_dtype
from ejkernel.types.grouped_matmul import GroupedMatmulConfig
from ejkernel.types.target import DEFAULT_CORE_COUNT

from . import tiles
from .problem import Problem, in_memory, problem_of

BAND = 8
"""Rows of tiles that are computed for a column of tiles before the next column (threadblock swizzle)."""


def grouped_matmul(*operands, spec: GroupedMatmulSpec, config: GroupedMatmulConfig) -> Outputs:
    """The product o, by the Triton kernel."""
    x = Operands(*operands)
    dtype = result_dtype(x.lhs.dtype, spec)
    return Outputs(multiply(x, problem_of(x, dtype, spec.transpose_rhs), dtype, config))


def grouped_matmul_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: GroupedMatmulSpec, config: GroupedMatmulConfig
) -> Outputs:
    """The tangent of o."""
    dtype = result_dtype(primals.lhs.dtype, spec)
    product = lambda x, wide: multiply(x, problem_of(x, dtype, spec.transpose_rhs), wide, config)
    return Outputs(tangent(primals, tangents, product, dtype))


def multiply(x: Operands, problem: Problem, dtype, config: GroupedMatmulConfig) -> jax.Array:
    """x.lhs · x.rhs by groups; `problem` says how rhs lies in memory, and whose the scale is."""
    rows, columns, depth = config.block_m, config.block_n, config.block_k
    lhs, rhs = x.lhs.reshape(-1, problem.K), in_memory(x.rhs, problem.transposed)
    rhs = rhs.reshape(-1, *rhs.shape[2:])
    if problem.described:
        lhs = _launch.described(lhs, (rows, depth))
        rhs = _launch.described(rhs, (1, columns, depth) if problem.transposed else (1, depth, columns))
    most = triton.cdiv(problem.N, columns) * (triton.cdiv(problem.M, rows) + min(problem.E + 1, problem.M))
    programs = min(most, (_launch.multiprocessors() or DEFAULT_CORE_COUNT) * residents(problem, config))
    return _launch.launch(
        rows_kernel,
        lhs,
        rhs,
        x.group_sizes,
        x.group_offset,
        x.existing_out,
        x.rhs_scale,
        out_type=jax.ShapeDtypeStruct((problem.B, problem.M, problem.N), dtype),
        grid=programs * problem.B,
        config=config,
        problem=problem,
        PROGRAMS=programs,
        BLOCK_M=rows,
        BLOCK_N=columns,
        BLOCK_K=depth,
        BAND=BAND,
    )


def residents(problem: Problem, config: GroupedMatmulConfig) -> int:
    """Programs that a multiprocessor holds at a time: two fill it where each has but one tensor core's warps, and three
    where they are small."""
    if config.num_warps > 4:
        return 1
    return 3 if problem.narrow and config.block_m < 64 else 2


@triton.jit
def rows_kernel(
    lhs, rhs, group_sizes, group_offset, existing_out, rhs_scale,
    o,
    problem: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0) // PROGRAMS
    columns: tl.constexpr = (problem.N + BLOCK_N - 1) // BLOCK_N
    # A scale of contracted features is a factor of lhs, any other one of the result.
    OF_LHS: tl.constexpr = rhs_scale is not None and problem.scaled_features and problem.scale_along_tiles
    group, starts, ends, offset = tiles.group_rows(group_sizes, group_offset, batch, problem)
    is_local = (group >= offset) & (group < offset + problem.E)
    count = tl.where(is_local, tl.cdiv(ends - starts, BLOCK_M), 0) * columns
    after = tl.cumsum(count)
    total = tl.sum(count)
    # The rows of groups of other shards are before `first` and from `last` on.
    first = tl.min(tl.where(is_local, starts, problem.M))
    last = tl.maximum(tl.max(tl.where(is_local, ends, 0)), first)
    tiles_before = tl.cdiv(first, BLOCK_M) * columns
    tiles_after = tl.cdiv(problem.M - last, BLOCK_M) * columns
    o += batch.to(tl.int64) * problem.M * problem.N

    for tile in tl.range(tl.program_id(0) % PROGRAMS, total + tiles_before + tiles_after, PROGRAMS):
        global_group = tl.sum((after <= tile).to(tl.int32))
        chosen = group == global_group
        start, end = tiles.pick(starts, chosen), tiles.pick(ends, chosen)
        tile_in_group = tile - tiles.pick(after - count, chosen)
        depth = problem.K
        if tile >= total:
            is_before = tile < total + tiles_before
            start, end = tl.where(is_before, 0, last), tl.where(is_before, first, problem.M)
            tile_in_group = tile - total - tl.where(is_before, 0, tiles_before)
            depth = 0
        row, column = tiles.in_bands(tile_in_group, tl.cdiv(end - start, BLOCK_M), columns, BAND)
        row, column = start + row * BLOCK_M, column * BLOCK_N

        local_group = global_group - offset
        total_tile = tile_product(
            lhs, rhs, rhs_scale, batch, local_group, row, end, column, depth, problem, BLOCK_M, BLOCK_N, BLOCK_K, OF_LHS
        )
        if rhs_scale is not None and not OF_LHS:  # noqa: SIM102
            if tile < total:
                total_tile *= tiles.load_scale(rhs_scale, batch, local_group, column, problem.N, problem, BLOCK_N)
        rows = row + tl.arange(0, BLOCK_M)[:, None]
        cols = column + tl.arange(0, BLOCK_N)[None, :]
        at, ok = rows.to(tl.int64) * problem.N + cols, (rows < end) & (cols < problem.N)
        if existing_out is not None:  # noqa: SIM102
            if tile >= total:
                existing = existing_out + batch.to(tl.int64) * problem.M * problem.N
                total_tile = tl.load(existing + at, mask=ok, other=0).to(tl.float32)
        tl.store(o + at, total_tile.to(o.dtype.element_ty), mask=ok)


@triton.jit
def tile_product(
    lhs, rhs, rhs_scale, batch, local_group, row, end, column, depth,
    problem: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OF_LHS: tl.constexpr,
):  # fmt: skip
    """A tile of the product of rows with the matrix of their group, over `depth` features; float32."""
    # Tiles of less than 64 rows are multiplied with matrices in registers, not in shared memory.
    INTERLEAVED: tl.constexpr = problem.narrow and not problem.transposed and BLOCK_M < 64
    SWAP_AB: tl.constexpr = problem.swap_ab and BLOCK_M >= 128 and BLOCK_N >= 64 and not OF_LHS
    matrix_index = local_group + (batch * problem.E if problem.rhs_varies else 0)
    total = tl.zeros([BLOCK_N, BLOCK_M] if SWAP_AB else [BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, depth, BLOCK_K):
        x = tiles.load_rows(
            lhs, batch * problem.M + row, batch * problem.M + end, k, problem.K, BLOCK_M, BLOCK_K, problem.described
        )
        if OF_LHS:
            x = (x * tiles.load_scale(rhs_scale, batch, local_group, k, problem.K, problem, BLOCK_K)).to(x.dtype)
        matrix = tiles.load_matrix(rhs, matrix_index, k, column, problem, BLOCK_K, BLOCK_N)
        if SWAP_AB:
            matrix = tiles.widened(tiles.transposed_operand(matrix, BLOCK_K, BLOCK_N), x.dtype)
            total = tiles.wait_for_product(tiles.add_product(total, matrix, x.T, problem))
        else:
            if INTERLEAVED:
                matrix = tiles.interleave_columns(matrix, BLOCK_K, BLOCK_N)
            total = tiles.add_product(total, x, tiles.widened(matrix, x.dtype), problem)
    if SWAP_AB:
        total = tiles.transposed_result(total, BLOCK_M, BLOCK_N)
    if INTERLEAVED:
        total = tiles.deinterleave_columns(total, BLOCK_M, BLOCK_N)
    return total
