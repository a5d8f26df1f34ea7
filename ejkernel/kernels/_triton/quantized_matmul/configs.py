"""Which configs the kernels of quantized_matmul are run with: block_n columns of a program, block_k features at a time.

block_m is all rows, a power of two from 16 on; with fewer than all the kernel reads the codes for each block of them.
The order is that of the times on an H200.
"""

from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.primitives.quantized_matmul import Operands, QuantizedMatmulSpec
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.quantized_matmul import QuantizedMatmulConfig

# (columns, features, warps, stages); with the most rows of a tile the first two change places.
TILES = ((64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 3), (128, 128, 8, 3), (32, 64, 2, 4))
SMALLEST = (16, 16, 1, 1)  # where none of the list fits into the shared memory of the target
MOST_ROWS = 64

REGISTERS = "registers"
"""The algorithm of registers.py."""
# (columns of a lane, features, warps, stages); with few rows a lane has the registers for more columns.
OF_LANES = ((16, 32, 8, 2), (16, 64, 8, 2), (8, 32, 8, 2), (8, 64, 4, 2))
OF_LANES_AND_FEW_ROWS, FEW_ROWS = ((32, 32, 8, 2), (16, 32, 8, 2), *OF_LANES[1:]), 8
# With more than 16 rows it has sums for 32, and registers for at most two words beside them.
OF_LANES_AND_MANY_ROWS, MOST_ROWS_IN_REGISTERS = ((16, 32, 8, 2), (8, 32, 8, 2)), 32
WORDS = (1, 2, 4)


def space(operation: str, operands: Operands, spec: QuantizedMatmulSpec, target: Target) -> list[QuantizedMatmulConfig]:
    """Configs that fit, the likeliest first."""
    limit = shared_memory_limit(target)
    first = TILES[:2] if rows_of_tile(operands) < MOST_ROWS else TILES[1::-1]
    configs = [_config(operands, tile) for tile in (*first, *TILES[2:], SMALLEST)]
    is_forward = not operation.endswith("_bwd")
    if x_rows(operands) <= MOST_ROWS_IN_REGISTERS and not registers_refusal(
        is_forward != spec.transpose, operands, target
    ):
        configs = _in_registers(operands, spec) + configs
    fitting = [config for config in configs[:-1] if shared_memory(operation, operands, config) <= limit]
    return fitting or configs[-1:]


def registers_refusal(over_rows: bool, operands: Operands, target: Target) -> str | None:
    """Why codes of these operands are not made numbers in registers, or None; over_rows: their rows are contracted."""
    if target.platform != "cuda":
        return f"registers are laid out for mma.sync of PTX, which {target.platform} does not have"
    if not over_rows:
        return "the codes of a word are contracted; registers have them as columns of the product"
    dtypes = {name: getattr(operands, name).dtype.name for name in ("x", "scales", "zeros")}
    if len(set(dtypes.values())) > 1:
        return ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items()) + "; they have to be alike"
    if (features := operands.w.shape[1] * operands.w.shape[2]) % 2:
        return f"{features} features are contracted; registers have pairs of them"
    return None


def _in_registers(operands: Operands, spec: QuantizedMatmulSpec) -> list[QuantizedMatmulConfig]:
    columns = operands.w.shape[3] * operands.w.shape[4] * spec.group_size
    rows = x_rows(operands)
    table = OF_LANES_AND_FEW_ROWS if rows <= FEW_ROWS else OF_LANES if rows <= 16 else OF_LANES_AND_MANY_ROWS
    words = WORDS if rows <= 16 else WORDS[:2]
    return [
        _config(operands, (8 * warps * of_lane, features, warps, stages), REGISTERS)
        for of_lane, features, warps, stages in table
        if of_lane * spec.bits / 32 in words and spec.group_size % of_lane == columns % of_lane == 0
    ]


def _config(operands: Operands, tile: tuple[int, int, int, int], algorithm: str | None = None) -> QuantizedMatmulConfig:
    columns, features, warps, stages = tile
    rows = rows_of_tile(operands)
    of = dict(algorithm=algorithm, platform=Platform.TRITON, backend=Backend.GPU)
    return QuantizedMatmulConfig(rows, columns, features, num_warps=warps, num_stages=stages, **of)


def x_rows(operands: Operands) -> int:
    """Rows of x, of all batches."""
    return operands.x.shape[0] * operands.x.shape[1]


def rows_of_tile(operands: Operands) -> int:
    """All rows, a power of two, as far as a kernel takes them."""
    rows = min(MOST_ROWS, x_rows(operands))
    return max(16, 1 << max(0, rows - 1).bit_length())


def smallest_memory(operands: Operands) -> int:
    """Bytes of shared memory of a program with the smallest tile."""
    columns, features, _, stages = SMALLEST
    return tiles_memory(rows_of_tile(operands), columns, features, stages, operands.x.dtype.itemsize)


def shared_memory(operation: str, operands: Operands, config: QuantizedMatmulConfig) -> int:
    """Bytes of shared memory of a program: `tiles_memory`, or the sums of registers on their way to device memory."""
    if config.algorithm == REGISTERS:
        return 4 * config.block_m * config.block_n
    sizes = (config.block_m, config.block_n, config.block_k, config.num_stages)
    return tiles_memory(*sizes, operands.x.dtype.itemsize)


def tiles_memory(rows: int, columns: int, features: int, stages: int, item: int) -> int:
    """Bytes of shared memory of a program, at the most.

    The rows, words, scales and zeros of each stage of the pipeline, and the numbers of a tile, which are brought to the
    layout of the product.
    """
    tile = columns * features
    stage = rows * features * item + tile + 2 * 4 * tile // 16
    return stages * stage + 4 * tile + 4 * rows * columns
