"""The kernel for the gradient of the matrices: of each group g of the rows of x [m, r] and y [m, c],

    z_g = Σ_{i∈g} x_iᵀ · y_i

The kernel is persistent: a fixed number of thread blocks share the tiles of all z, matrix after matrix. Two consumer
warpgroups compute 64 rows of a tile each; the producer warpgroup loads the next rows, of this tile or the following
one, and TMA stores a tile while the next is computed. No two thread blocks add to the same number.

Rows are loaded in tiles that begin at multiples of 8. Rows of other groups in the first and the last tile of a group,
which may be NaN, are set to 0 in shared memory.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._target import gpu_target

from .._launch import (
    FIRST_BARRIER,
    ROWS,
    WGMMA,
    accumulator,
    arrive,
    indices,
    launch,
    load_vector,
    shared,
    stage_of,
    sync,
)

SHARED_BYTES = 226 * 1024  # for tiles in a thread block
CONSUMERS, WARPGROUPS = 2, 3
REGISTERS = 232, 40  # of a thread that multiplies, and of one that loads
EDGES = 2  # tiles of rows of a group that may hold others
BAND = 8  # tiles of rows that are computed together for each tile of columns
MASKED, EMPTY = FIRST_BARRIER, FIRST_BARRIER + 1  # named barriers: from the latter on, one for each stage
ALIGNMENT = 256  # bytes; Mosaic GPU refuses an operand that begins elsewhere


@dataclass(frozen=True)
class Plan:
    """The shapes of z, [groups, rows, columns], its tiles, and on how many multiprocessors they are scheduled."""

    groups: int
    rows: int
    columns: int
    block_columns: int
    depth: int
    stages: int
    dtype: np.dtype
    processors: int = field(default_factory=lambda: gpu_target().core_count)

    @property
    def block_rows(self) -> int:
        return CONSUMERS * ROWS

    @property
    def parts(self) -> int:
        """The number of parts in which a tile is stored, one after the other: as few as shared memory allows."""
        inputs = self.stages * self.depth * (self.block_rows + self.block_columns)
        numbers = SHARED_BYTES // self.dtype.itemsize - inputs
        return next(n for n in (1, 2, 4) if self.block_rows * self.block_columns // n <= numbers)

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.block_rows)

    @property
    def column_tiles(self) -> int:
        return -(-self.columns // self.block_columns)

    @property
    def tiles(self) -> int:
        return self.groups * self.row_tiles * self.column_tiles

    @property
    def blocks(self) -> int:
        return min(self.processors, self.tiles)

    def work_tiles(self) -> Array:
        """The number of work tiles of this thread block."""
        return lax.div(self.tiles - 1 - lax.axis_index("block"), jnp.int32(self.blocks)) + 1

    def group(self, work_tile: Array) -> Array:
        number = lax.axis_index("block") + jnp.minimum(work_tile, self.work_tiles() - 1) * self.blocks
        return lax.div(number, jnp.int32(self.row_tiles * self.column_tiles))

    def tile(self, work_tile: Array) -> tuple[Array, Array]:
        """The first row and the first column of this thread block's n-th work tile."""
        number = lax.rem(
            lax.axis_index("block") + work_tile * self.blocks, jnp.int32(self.row_tiles * self.column_tiles)
        )
        band = lax.div(number, jnp.int32(BAND * self.column_tiles))
        height = jnp.minimum(self.row_tiles - band * BAND, BAND)
        within = number - band * BAND * self.column_tiles
        return (band * BAND + lax.rem(within, height)) * self.block_rows, lax.div(within, height) * self.block_columns


def multiply_groups(x: Array, y: Array, starts: Array, ends: Array, plan: Plan) -> Array:
    """z [groups, rows, columns] of the groups that are the rows from starts [groups] to ends [groups]."""
    width = plan.block_columns
    return launch(
        partial(_kernel, plan=plan),
        "grouped_matmul_matrices",
        (_in_one_buffer(starts, ends), x, y),
        out_type=jax.ShapeDtypeStruct((plan.groups, plan.rows, plan.columns), plan.dtype),
        blocks=plan.blocks,
        warpgroups=WARPGROUPS,
        scratch=dict(
            x_tiles=shared((plan.stages, CONSUMERS, plan.depth, ROWS), plan.dtype),
            y_tiles=shared((plan.stages, plan.depth, width), plan.dtype),
            z_tiles=shared((CONSUMERS, ROWS, width // plan.parts), plan.dtype),
            full=plgpu.Barrier(num_barriers=plan.stages, num_arrivals=CONSUMERS + 1),
        ),
    )


def _in_one_buffer(starts: Array, ends: Array) -> Array:
    """Concatenates starts and ends in a buffer whose size is a multiple of `ALIGNMENT`.

    XLA packs the temporaries of a program at multiples of 128 bytes; after one that is no multiple of 256 bytes, the
    next may begin at an address that Mosaic GPU refuses.
    """
    both = jnp.concatenate([starts, ends])
    return jnp.pad(both, (0, -both.size % (ALIGNMENT // both.dtype.itemsize)))


def _kernel(limits, x, y, z, *, plan: Plan, x_tiles, y_tiles, z_tiles, full):
    number, work_tiles = lax.axis_index("warpgroup"), plan.work_tiles()

    def bounds(work_tile):
        group = plan.group(work_tile)
        return limits[group], limits[plan.groups + group]

    def multiply():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        for stage in range(plan.stages):
            arrive(EMPTY + stage, WARPGROUPS)

        def one(work_tile, carry):
            step, *found = carry
            following = bounds(work_tile + 1)
            step = _tile(work_tile, step, *found, z, x_tiles, y_tiles, z_tiles, full, plan)
            return step, *following

        lax.fori_loop(0, work_tiles, one, (jnp.int32(0), *bounds(jnp.int32(0))))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def load():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")

        def one(work_tile, carry):
            step, start, end = carry
            following = bounds(work_tile + 1)
            row, column = plan.tile(work_tile)

            def fetch(i, _):
                stage = stage_of(step + i, plan.stages)
                rows = pl.ds(pl.multiple_of(_first_row(i, start, end, plan), 8), plan.depth)
                sync(EMPTY + stage, WARPGROUPS)
                for part in range(CONSUMERS):
                    mine = pl.ds(row + part * ROWS, ROWS)
                    plgpu.copy_gmem_to_smem(x.at[rows, mine], x_tiles.at[stage, part], full.at[stage])
                plgpu.copy_gmem_to_smem(
                    y.at[rows, pl.ds(column, plan.block_columns)], y_tiles.at[stage], full.at[stage]
                )

            steps = _steps(start, end, plan)
            lax.fori_loop(0, steps, fetch, None)
            return step + steps, *following

        lax.fori_loop(0, work_tiles, one, (jnp.int32(0), *bounds(jnp.int32(0))))

    lax.cond(number < CONSUMERS, multiply, load)


def _tile(work_tile, step, start, end, z, x_tiles, y_tiles, z_tiles, full, plan: Plan):
    """Computes and stores the rows of this warpgroup of one tile; returns the step of the pipeline after it."""
    number, steps = lax.axis_index("warpgroup"), _steps(start, end, plan)
    group, (row, column) = plan.group(work_tile), plan.tile(work_tile)

    def scoped(total):
        def compute(i, _, edge):
            stage = stage_of(step + i, plan.stages)
            plgpu.barrier_wait(full.at[stage])
            if edge:
                first, half = _first_row(i, start, end, plan), plan.block_columns // CONSUMERS
                _mask(x_tiles.at[stage, number], first, start, end)
                _mask(y_tiles.at[stage, :, pl.ds(pl.multiple_of(number * half, half), half)], first, start, end)
                sync(MASKED, CONSUMERS)
            plgpu.wgmma(total, x_tiles.at[stage, number].T, y_tiles.at[stage])
            plgpu.wgmma_wait(1)
            pl.when(i > 0)(lambda: arrive(EMPTY + stage_of(step + i - 1, plan.stages), WARPGROUPS))

        lax.fori_loop(0, jnp.minimum(steps, EDGES), partial(compute, edge=True), None)
        lax.fori_loop(EDGES, steps, partial(compute, edge=False), None)
        plgpu.wgmma_wait(0)
        pl.when(steps > 0)(lambda: arrive(EMPTY + stage_of(step + steps - 1, plan.stages), WARPGROUPS))
        return total[...]

    total = pl.run_scoped(scoped, accumulator(ROWS, plan.block_columns)).astype(plan.dtype)
    width = plan.block_columns // plan.parts
    for part in range(plan.parts):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        z_tiles[number] = total[:, part * width : (part + 1) * width]
        plgpu.commit_smem()
        at = group, pl.ds(row + number * ROWS, ROWS), pl.ds(column + part * width, width)
        plgpu.copy_smem_to_gmem(z_tiles.at[number], z.at[at])
    return step + steps


def _mask(tile, first: Array, start: Array, end: Array) -> None:
    """Zeroes the rows of a tile that begins at row `first` which are outside of start ≤ row < end."""
    rows = indices(first, 0, tile.shape)
    x = load_vector(tile, WGMMA)
    tile[...] = jnp.where((rows >= start) & (rows < end), x, jnp.zeros((), x.dtype))
    plgpu.commit_smem()


def _first_row(i: Array, start: Array, end: Array, plan: Plan) -> Array:
    """The first row of the tile of step i: steps take the first tile of a group, then the last, then those between."""
    tile = jnp.where(i == 0, 0, jnp.where(i == 1, _steps(start, end, plan) - 1, i - 1))
    return _aligned(start) + tile * plan.depth


def _aligned(row: Array) -> Array:
    return lax.div(row, jnp.int32(8)) * 8


def _steps(start: Array, end: Array, plan: Plan) -> Array:
    """Tiles of rows of a group."""
    return jnp.where(end > start, lax.div(end - _aligned(start) + plan.depth - 1, jnp.int32(plan.depth)), 0)
