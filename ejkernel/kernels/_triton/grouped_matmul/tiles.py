"""What the kernels of grouped_matmul share: where the groups are, and reading tiles through descriptors or pointers."""

import triton
import triton.language as tl


@triton.jit
def group_rows(group_sizes, group_offset, batch, problem: tl.constexpr):
    """Of every group its number, first row and row after the last, and the number of the first group of this shard."""
    group = tl.arange(0, problem.F_PAD)
    if problem.sizes_vary:
        group_sizes += batch * problem.F
    sizes = capped(tl.load(group_sizes + group, mask=group < problem.F, other=0), problem)
    offset = 0
    if group_offset is not None:
        offset = tl.minimum(tl.load(group_offset + batch if problem.offset_varies else group_offset), problem.F)
    ends = tl.cumsum(sizes)
    starts, ends = tl.minimum(ends - sizes, problem.M), tl.minimum(ends, problem.M)
    return group, starts.to(tl.int32), ends.to(tl.int32), offset


@triton.jit
def rows_of_group(group_sizes, group_offset, batch, index, problem: tl.constexpr):
    """The first row of the index-th group of this shard, and the row after its last."""
    group = tl.arange(0, problem.F_PAD)
    if problem.sizes_vary:
        group_sizes += batch * problem.F
    if group_offset is not None:
        index += tl.minimum(tl.load(group_offset + batch if problem.offset_varies else group_offset), problem.F)
    size = capped(tl.load(group_sizes + index, mask=index < problem.F, other=0), problem)
    before = tl.load(group_sizes + group, mask=(group < index) & (group < problem.F), other=0)
    start = tl.sum(capped(before, problem))
    return tl.minimum(start, problem.M).to(tl.int32), tl.minimum(start + size, problem.M).to(tl.int32)


@triton.jit
def capped(sizes, problem: tl.constexpr):
    """Sizes of at most all rows, so that their sum does not overflow; in 64 bits where even that might."""
    sizes = tl.minimum(tl.maximum(sizes, 0), problem.M)
    return sizes.to(tl.int64) if problem.F * problem.M >= 2**31 else sizes


@triton.jit
def pick(values, chosen):
    """The value where `chosen` is true, once."""
    return tl.sum(tl.where(chosen, values, 0))


@triton.jit
def in_bands(tile, rows, columns, BAND: tl.constexpr):
    """Row and column of a tile, rasterized in bands of BAND rows of tiles, whose operands stay in the L2 cache."""
    band = tile // (BAND * columns)
    height = tl.minimum(rows - band * BAND, BAND)
    tile_in_band = tile - band * BAND * columns
    return band * BAND + tile_in_band % height, tile_in_band // height


@triton.jit
def load_rows(x, row, end, column, width: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
              DESCRIBED: tl.constexpr):  # fmt: skip
    """Rows from `row` on of x [rows, width]. Through a descriptor those from `end` on are whatever stands there."""
    if DESCRIBED:
        tile = x.load([row, column])
    else:
        rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        at = rows[:, None].to(tl.int64) * width + columns[None, :]
        tile = tl.load(x + at, mask=(rows[:, None] < end) & (columns[None, :] < width), other=0.0)
    return tile


@triton.jit
def load_matrix(rhs, matrix_index, k, n, problem: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile [BLOCK_K, BLOCK_N] of one matrix."""
    if not problem.described:
        row_step: tl.constexpr = 1 if problem.transposed else problem.N
        column_step: tl.constexpr = problem.K if problem.transposed else 1
        rows, columns = (k + tl.arange(0, BLOCK_K))[:, None], (n + tl.arange(0, BLOCK_N))[None, :]
        at = (
            matrix_index.to(tl.int64) * problem.K * problem.N
            + rows.to(tl.int64) * row_step
            + columns.to(tl.int64) * column_step
        )
        tile = tl.load(rhs + at, mask=(rows < problem.K) & (columns < problem.N), other=0.0)
    elif problem.transposed:
        tile = rhs.load([matrix_index, n, k]).reshape(BLOCK_N, BLOCK_K).T
    else:
        tile = rhs.load([matrix_index, k, n]).reshape(BLOCK_K, BLOCK_N)
    return tile


@triton.jit
def widened(tile, dtype: tl.constexpr):
    """A tile in a dtype; floats of 8 bits come to bfloat16 by way of float32, as no fast instruction leads there."""
    if tile.dtype.is_fp8() and dtype == tl.bfloat16:
        tile = tile.to(tl.float32)
    return tile.to(dtype)


@triton.jit
def interleave_columns(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns 0, 4, 8, …, then 1, 5, 9, …: a thread then loads its operand of 8 bits in words of four bytes."""
    return tile.reshape(ROWS, COLUMNS // 4, 4).permute(0, 2, 1).reshape(ROWS, COLUMNS)


@triton.jit
def deinterleave_columns(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The inverse of `interleave_columns`."""
    return tile.reshape(ROWS, 4, COLUMNS // 4).permute(0, 2, 1).reshape(ROWS, COLUMNS)


@triton.jit
def transposed_operand(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """tileᵀ as the A operand of wgmma, in registers. Its rows are permuted so that the four rows of a thread, which are
    8 and COLUMNS / 2 apart, are four consecutive bytes of the tile."""
    return tile.reshape(ROWS, COLUMNS // 32, 8, 2, 2).permute(3, 1, 4, 2, 0).reshape(COLUMNS, ROWS)


@triton.jit
def transposed_result(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """oᵀ, whose rows have the order of `transposed_operand`, as o [ROWS, COLUMNS]."""
    return tile.reshape(2, COLUMNS // 32, 2, 8, ROWS).permute(4, 1, 3, 0, 2).reshape(ROWS, COLUMNS)


@triton.jit
def wait_for_product(total):
    """The accumulator after its wgmma is complete: an empty instruction uses it. Without that Triton 3.6 loads the next
    A operand into registers that a wgmma in flight still reads.
    """
    return tl.inline_asm_elementwise("", "=f,0", [total], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def add_product(total, x, y, problem: tl.constexpr):
    """total + x·y. Accumulators are promoted by a subtraction of (−x)·y: the compiler would fuse a sum into the dot."""
    if problem.promotes_accumulators:
        total -= tl.dot(-x, y, input_precision="ieee")
    else:
        total = tl.dot(x, y, total)
    return total


@triton.jit
def load_scale(scale, batch, group, first, size: tl.constexpr, problem: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK factors [1, BLOCK] from `first` of `size` on, or the one of them all."""
    b: tl.constexpr = problem.scale_strides[0]
    e: tl.constexpr = problem.scale_strides[1]
    scale += batch * b + group * e
    if problem.scale_along_tiles:
        columns = first + tl.arange(0, BLOCK)[None, :]
        factors = tl.load(scale + columns, mask=columns < size, other=0.0)
    else:
        factors = tl.load(scale)
    return factors
