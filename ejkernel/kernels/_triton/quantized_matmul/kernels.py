"""The kernels of quantized_matmul: few rows times a matrix of affine codes, or times its transpose.

A program has a tile of columns and a part of the contracted features, which is cut into parts where there are fewer
tiles than keep the device busy; the sums of parts are added up in a second step, in order: every run gives the same
bits. The words of a tile become numbers in registers, and rows times numbers is a product of matrices.

A tile has all rows, unless its config is for fewer: that of a call is chosen before `jax.vmap` gives it more.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels import _quantized_matmul as trio
from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._triton import _launch
from ejkernel.primitives.quantized_matmul import Operands, Outputs, QuantizedMatmulSpec
from ejkernel.types.quantized_matmul import QuantizedMatmulConfig

from . import fragments
from .configs import REGISTERS, WORDS, registers_refusal
from .registers import product_in_registers

PROGRAMS_PER_CORE, WARPS_PER_CORE = 4, 16
SUMS_OF_MANY_WARPS = 64
"""Sums of a lane in registers, with which so many warps run at once; with more there are half as many."""
# Of a lane whose codes become numbers in registers: sums, and steps of 16 features.
MOST_SUMS, MOST_STEPS = 128, 4
LEAST_STEPS = 4
"""Tiles of features that a part has at the least: fewer would not fill the pipeline."""


@dataclass(frozen=True)
class Problem:
    """The shapes of one call, as a compile-time constant.

    Attributes:
        M: rows of x.
        R, C: rows of codes, and codes of a row.
        bits, group: of the format.
        over_rows: whether the rows of codes are contracted, and their columns those of the product, or the other way.
        parts: of the contracted features.
        ptx: whether the kernel may have instructions of PTX, which are NVIDIA's.
    """

    M: int
    R: int
    C: int
    bits: int
    group: int
    over_rows: bool
    parts: int
    ptx: bool

    @property
    def columns(self) -> int:
        """The number of columns of the product."""
        return self.C if self.over_rows else self.R

    @property
    def features(self) -> int:
        """The number of features over which the product sums."""
        return self.R if self.over_rows else self.C


def quantized_matmul(*operands: jax.Array | None, spec: QuantizedMatmulSpec, config: QuantizedMatmulConfig) -> Outputs:
    """o [b, m, n, g, j]."""
    x = Operands(*operands)
    return trio.forward(x, spec, partial(_product, of=x, spec=spec, config=config))


def quantized_matmul_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: QuantizedMatmulSpec, config: QuantizedMatmulConfig
) -> Outputs:
    """The tangent of o."""
    product = partial(_product, of=primals, spec=spec, config=config)
    return trio.tangent(primals, outputs, tangents, spec, product, gpu_target())


def quantized_matmul_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: QuantizedMatmulSpec,
    config: QuantizedMatmulConfig,
) -> tuple[jax.Array, ...]:
    """The cotangents of the operands named in wrt."""
    product = partial(_product, of=primals, spec=spec, config=config)
    return trio.cotangents(primals, outputs, cotangents, wrt, spec, product, gpu_target())


def _product(
    x: jax.Array, over_rows: bool, of: Operands, spec: QuantizedMatmulSpec, config: QuantizedMatmulConfig
) -> jax.Array:
    """The rows [b, m, …] of x times the matrix of the codes, [b · m, columns] in the dtype of x."""
    _, k, n, g, h, _ = of.w.shape
    rows, R, C = x.shape[0] * x.shape[1], k * n, g * h * spec.group_size
    if config.algorithm == REGISTERS:
        if wrong := registers_refusal(over_rows, of, gpu_target()):
            raise ValueError(f"quantized_matmul: config.algorithm is {REGISTERS}, but {wrong}")
        problem = in_registers(rows, R, C, of, spec, config)
        kernel, blocks, programs = product_in_registers, {}, problem.programs_of_part * problem.parts
    else:
        problem = Problem(rows, R, C, spec.bits, spec.group_size, over_rows, parts=1, ptx=_launch.has_ptx())
        tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(problem.columns, config.block_n)
        problem = replace(problem, parts=_parts(tiles, triton.cdiv(problem.features, config.block_k)))
        kernel, programs = product_kernel, problem.parts * tiles
        blocks = dict(BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k)
    whole = problem.parts == 1
    shape = (problem.parts, rows, C if over_rows else R)
    o = _launch.launch(
        kernel,
        x.reshape(rows, R if over_rows else C),
        of.w,
        of.scales,
        of.zeros,
        out_type=jax.ShapeDtypeStruct(shape, x.dtype if whole else jnp.float32),
        grid=programs,
        config=config,
        problem=problem,
        **blocks,
    )
    return o[0] if whole else o.sum(0).astype(x.dtype)


def in_registers(
    rows: int, R: int, C: int, of: Operands, spec: QuantizedMatmulSpec, config: QuantizedMatmulConfig
) -> fragments.Problem:
    """The problem of registers.py for a call with a config.

    Raises:
        ValueError: the config is one for other shapes.
    """
    of_lane = config.block_n // (8 * config.num_warps)
    words, steps = of_lane * spec.bits // 32, config.block_k // fragments.FEATURES_OF_STEP
    if words not in WORDS or of_lane * spec.bits % 32 or spec.group_size % of_lane or C % of_lane:
        raise ValueError(
            f"quantized_matmul: config.block_n gives each lane {of_lane} columns; in registers these must be codes of "
            f"{WORDS} words, and divide the group of {spec.group_size} and all {C} columns"
        )
    tiles = min(config.block_m // 8, triton.next_power_of_2(triton.cdiv(rows, 8)))
    if (sums := 2 * tiles * of_lane) > MOST_SUMS or steps > MOST_STEPS:
        raise ValueError(
            f"quantized_matmul: config gives each lane {sums} sums and {16 * steps} features at a time; its registers "
            f"hold {MOST_SUMS} and {16 * MOST_STEPS}"
        )
    sizes = dict(words=words, steps=steps, warps=config.num_warps, ahead=config.num_stages > 1, ptx=_launch.has_ptx())
    of = spec.bits, spec.group_size, of.x.dtype.name
    problem = fragments.Problem(rows, R, C, *of, parts=1, tiles=tiles, **sizes)
    return replace(problem, parts=_parts_in_registers(problem))


def _parts(tiles: int, steps: int) -> int:
    """The number of parts of the sum over features: as many as keep the device busy, but of some steps each."""
    wanted = PROGRAMS_PER_CORE * (_launch.multiprocessors() or 1) / tiles
    return max(1, min(math.ceil(wanted), steps // LEAST_STEPS))


def _parts_in_registers(problem: fragments.Problem) -> int:
    """As many as have as many warps at once as registers are for; none is empty, as each begins with a read."""
    many = 2 * problem.tiles * (32 * problem.words // problem.bits) <= SUMS_OF_MANY_WARPS
    at_once = WARPS_PER_CORE // (1 if many else 2) // problem.warps * (_launch.multiprocessors() or 1)
    wanted = max(1, min(at_once // problem.programs_of_part, problem.blocks // LEAST_STEPS))
    return triton.cdiv(problem.blocks, triton.cdiv(problem.blocks, wanted))


@triton.jit
def product_kernel(
    x, w, scales, zeros,
    o,
    problem: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = problem.columns
    FEATURES: tl.constexpr = problem.features
    TILES_OF_ROWS: tl.constexpr = (problem.M + BLOCK_M - 1) // BLOCK_M
    TILES: tl.constexpr = TILES_OF_ROWS * ((COLUMNS + BLOCK_N - 1) // BLOCK_N)
    STEPS: tl.constexpr = (FEATURES + BLOCK_K - 1) // BLOCK_K
    STEPS_OF_PART: tl.constexpr = (STEPS + problem.parts - 1) // problem.parts
    program = tl.program_id(0)
    tile, part = program % TILES, program // TILES
    column, first_row = tile // TILES_OF_ROWS * BLOCK_N, tile % TILES_OF_ROWS * BLOCK_M
    row, feature = first_row + tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(part * STEPS_OF_PART, tl.minimum(part * STEPS_OF_PART + STEPS_OF_PART, STEPS)):
        first = step * BLOCK_K
        inside = (row < problem.M) & (first + feature < FEATURES)
        rows = tl.load(x + row * FEATURES + first + feature, mask=inside, other=0.0)
        if problem.over_rows:
            numbers = numbers_of(w, scales, zeros, first, column, rows.dtype, problem, BLOCK_K, BLOCK_N)
        else:
            numbers = tl.trans(numbers_of(w, scales, zeros, column, first, rows.dtype, problem, BLOCK_N, BLOCK_K))
        total = tl.dot(rows, numbers, total)
    columns = column + tl.arange(0, BLOCK_N)[None, :]
    at = (part * problem.M + row).to(tl.int64) * COLUMNS + columns
    tl.store(o + at, total.to(o.dtype.element_ty), mask=(row < problem.M) & (columns < COLUMNS))


@triton.jit
def numbers_of(
    w, scales, zeros, first_row, first_code, dtype: tl.constexpr,
    problem: tl.constexpr, ROWS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """(code − zero) · scale of a tile of codes, [ROWS, CODES] in `dtype`; 0 beyond the ends of the matrix."""
    PER_WORD: tl.constexpr = 32 // problem.bits
    WORDS: tl.constexpr = problem.C // PER_WORD
    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    word = first_code // PER_WORD + tl.arange(0, CODES // PER_WORD)[None, :]
    words = tl.load(w + row * WORDS + word, mask=(row < problem.R) & (word < WORDS), other=0)
    zero = of_words(zeros, row, first_code, problem, ROWS, CODES)
    scale = of_words(scales, row, first_code, problem, ROWS, CODES)
    base = -(zero + float(1 << problem.bits)) * scale
    return tl.reshape(every(words, scale, base, dtype, problem, 0, 1), [ROWS, CODES])


@triton.jit
def of_words(ptr, row, first_code, problem: tl.constexpr, ROWS: tl.constexpr, CODES: tl.constexpr):
    """The scale or the zero of each word of a tile, [ROWS, CODES / codes of a word] in float32."""
    GROUPS: tl.constexpr = problem.C // problem.group
    TILE_GROUPS: tl.constexpr = (CODES + problem.group - 1) // problem.group
    WORDS: tl.constexpr = CODES * problem.bits // 32
    group = first_code // problem.group + tl.arange(0, TILE_GROUPS)[None, :]
    x = tl.load(ptr + row * GROUPS + group, mask=(row < problem.R) & (group < GROUPS), other=0.0).to(tl.float32)
    return tl.reshape(tl.broadcast_to(x[:, :, None], [ROWS, TILE_GROUPS, WORDS // TILE_GROUPS]), [ROWS, WORDS])


@triton.jit
def every(words, scale, base, dtype: tl.constexpr, problem: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr):
    """base + (2^bits + code) · scale of the codes FIRST, FIRST + STEP, … of each word, which stay in its thread."""
    if STEP * problem.bits == 32:
        return tl.fma(float_of(words, problem.bits, FIRST, problem.ptx), scale, base).to(dtype)
    else:
        return tl.join(
            every(words, scale, base, dtype, problem, FIRST, 2 * STEP),
            every(words, scale, base, dtype, problem, FIRST + STEP, 2 * STEP),
        )


@triton.jit
def float_of(words, BITS: tl.constexpr, N: tl.constexpr, PTX: tl.constexpr):
    """2^BITS + code N of each word, in float32: the code becomes the first bits of the mantissa.

    That takes a shift and a logical instruction, where the conversion of an integer takes the time of four.
    """
    PLACE: tl.constexpr = 23 - BITS
    moved = words >> (N * BITS - PLACE) if N * BITS > PLACE else words << (PLACE - N * BITS)
    if PTX:
        bits = tl.inline_asm_elementwise(masked_or(BITS), "=r,r", [moved], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        bits = (moved & mask_of(BITS)) | exponent_of(BITS)
    return bits.to(tl.float32, bitcast=True)


@triton.constexpr_function
def mask_of(bits: int) -> int:
    """The first bits of the mantissa of a float32."""
    return ((1 << bits) - 1) << (23 - bits)


@triton.constexpr_function
def exponent_of(bits: int) -> int:
    """The exponent of 2^bits."""
    return (127 + bits) << 23


@triton.constexpr_function
def masked_or(bits: int) -> str:
    """x & mask | exponent in one instruction; of the two operations ptxas makes two, as both have a constant."""
    return f"lop3.b32 $0, $1, {mask_of(bits):#x}, {exponent_of(bits):#x}, 0xea;"
