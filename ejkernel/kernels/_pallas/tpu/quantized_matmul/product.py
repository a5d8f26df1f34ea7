"""The kernel that multiplies rows by a matrix of affine codes, or by its transpose.

The grid is (tiles of rows of x, tiles of the result's columns, tiles that are summed over). With P codes in a word,
code c of every word of a tile is a matrix of its own,

    W_c [rows of codes, words],    (code − zero) · scale in float32, rounded to the dtype of x

whose scales and zeros are those of the groups, spread over their words by a product with ones and zeros. So codes never
change their lanes; instead the P results, or with Wᵀ the P parts of x, are brought into the order of columns outside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels import _quantized_matmul as trio
from ejkernel.primitives.quantized_matmul import Operands, Outputs, QuantizedMatmulSpec
from ejkernel.types import Target
from ejkernel.types.quantized_matmul import QuantizedMatmulConfig

from .. import VMEM_BYTES, round_up
from .configs import LANES, MOST_WORDS, ROWS, words_of_tile

MOST_SUMS = 2**21
"""Sums of a tile in float32, for all codes of a word."""
NOT_FINITE = -(2.0**127)
"""A power of two, which float32 and bfloat16 have; no group has it for a scale."""


def quantized_matmul(*operands: Array | None, spec: QuantizedMatmulSpec, config: QuantizedMatmulConfig) -> Outputs:
    """o [b, m, n, g, j]."""
    x = Operands(*operands)
    return trio.forward(x, spec, partial(product, of=x, spec=spec, config=config))


def quantized_matmul_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: QuantizedMatmulSpec, config: QuantizedMatmulConfig
) -> Outputs:
    """The tangent of o."""
    of_primals = partial(product, of=primals, spec=spec, config=config)
    return trio.tangent(primals, outputs, tangents, spec, of_primals, Target("tpu"))


def quantized_matmul_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: QuantizedMatmulSpec,
    config: QuantizedMatmulConfig,
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt."""
    of_primals = partial(product, of=primals, spec=spec, config=config)
    return trio.cotangents(primals, outputs, cotangents, wrt, spec, of_primals, Target("tpu"))


@dataclass(frozen=True)
class Problem:
    """The shapes of one call.

    Attributes:
        rows: of codes.
        words: of a row.
        bits, words_of_group: of the format.
        over_rows: whether the rows of codes are contracted, or the codes of a row.
        block_rows, block_words: of a tile.
    """

    rows: int
    words: int
    bits: int
    words_of_group: int
    over_rows: bool
    block_rows: int
    block_words: int

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def groups(self) -> int:
        return self.words // self.words_of_group

    @property
    def block_groups(self) -> int:
        return self.block_words // self.words_of_group

    @property
    def contracted(self) -> tuple[int, int]:
        """All that is summed over of each part of x, and a tile of it."""
        return (self.rows, self.block_rows) if self.over_rows else (self.words, self.block_words)

    @property
    def columns(self) -> tuple[int, int]:
        """All columns of a result, and a tile of them."""
        return (self.words, self.block_words) if self.over_rows else (self.rows, self.block_rows)


def product(x: Array, over_rows: bool, of: Operands, spec: QuantizedMatmulSpec, config: QuantizedMatmulConfig) -> Array:
    """The rows [b, m, …] of x times the matrix of the codes, [b · m, columns] in the dtype of x."""
    _, k, n, g, h, p = of.w.shape
    problem = _problem(k * n, g * h * p, spec, over_rows, config)
    w, scales, zeros = (a.reshape(k * n, -1) for a in (of.w, of.scales, of.zeros))
    m, parts = x.shape[0] * x.shape[1], 1 if over_rows else problem.per_word
    # [parts, m, contracted], in whole tiles: what is beyond is not read of codes, and is multiplied by 0.
    x = jnp.moveaxis(x.reshape(m, -1, parts), 2, 0)
    (summed, depth), (columns, width) = problem.contracted, problem.columns
    results = problem.per_word if over_rows else 1
    rows = min(config.block_m, round_up(m, ROWS), max(ROWS, round_up(MOST_SUMS // (results * width), ROWS)))
    x = jnp.pad(x, ((0, 0), (0, -m % rows), (0, -summed % depth)))
    of_codes = lambda i, j, s: (s, j) if over_rows else (j, s)
    of_groups = pl.BlockSpec((problem.block_rows, problem.block_groups), of_codes)
    o = pl.pallas_call(
        partial(_kernel, problem=problem),
        grid=(x.shape[1] // rows, pl.cdiv(columns, width), x.shape[2] // depth),
        in_specs=[
            pl.BlockSpec((parts, rows, depth), lambda i, j, s: (0, i, s)),
            pl.BlockSpec((problem.block_rows, problem.block_words), of_codes),
            of_groups,
            of_groups,
        ],
        out_specs=pl.BlockSpec((results, rows, width), lambda i, j, s: (0, i, j)),
        out_shape=jax.ShapeDtypeStruct((results, x.shape[1], columns), x.dtype),
        scratch_shapes=[pltpu.VMEM((results, rows, width), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * k * n * problem.words * problem.per_word,
            transcendentals=0,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in (x, w, scales, zeros)),
        ),
        name="quantized_matmul_product",
    )(x, w, scales, zeros)
    return jnp.moveaxis(o[:, :m], 0, 2).reshape(m, columns * results)


def _problem(
    rows: int, words: int, spec: QuantizedMatmulSpec, over_rows: bool, config: QuantizedMatmulConfig
) -> Problem:
    """Tiles of whole registers, of words and of groups; a row that is no longer than its tile is one."""
    block_words = words_of_tile(words, config.block_n, spec)
    # Where the rows of codes are contracted they are lanes of x.
    most = max(1, min(config.block_k, MOST_WORDS // block_words) // LANES) * LANES
    block_rows = rows if rows <= most else most
    return Problem(rows, words, spec.bits, spec.group_size * spec.bits // 32, over_rows, block_rows, block_words)


def _kernel(x, w, scales, zeros, o, total, *, problem: Problem):
    step = pl.program_id(2)
    tile_of_rows, tile_of_words = (step, pl.program_id(1)) if problem.over_rows else (pl.program_id(1), step)

    @pl.when(step == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    words, inside = pltpu.bitcast(w[...], jnp.int32), _inside(problem, tile_of_rows, tile_of_words)
    scale, zero = _spread([jnp.where(inside, a[...], 0) for a in (scales, zeros)], problem)
    dimensions = (((1,), (0 if problem.over_rows else 1,)), ((), ()))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    for n in range(problem.per_word):
        code = lax.shift_right_logical(words, problem.bits * n) & ((1 << problem.bits) - 1)
        weights = ((code.astype(jnp.float32) - zero) * scale).astype(x.dtype)
        part, result = (0, n) if problem.over_rows else (n, 0)
        total[result] += lax.dot_general(
            x[part], weights, dimensions, precision=precision, preferred_element_type=jnp.float32
        )

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        o[...] = total[...].astype(o.dtype)


def _inside(problem: Problem, tile_of_rows: Array, tile_of_words: Array) -> Array:
    """Which groups of a tile are there; the others hold anything, NaN included."""
    shape = (problem.block_rows, problem.block_groups)
    row = lax.broadcasted_iota(jnp.int32, shape, 0) + tile_of_rows * problem.block_rows
    group = lax.broadcasted_iota(jnp.int32, shape, 1) + tile_of_words * problem.block_groups
    return (row < problem.rows) & (group < problem.groups)


def _spread(of_groups: Sequence[Array], problem: Problem) -> tuple[Array, Array]:
    """Scale and zero of each word's group, [rows, words] in float32: one term of a sum, which is exact.

    A term that is not finite would make all sums NaN: NOT_FINITE is the scale of its group until it is spread.
    """
    shape = (problem.block_groups, problem.block_words)
    word = lax.broadcasted_iota(jnp.int32, shape, 1)
    first = lax.broadcasted_iota(jnp.int32, shape, 0) * problem.words_of_group
    ones = ((first <= word) & (word < first + problem.words_of_group)).astype(jnp.float32)

    def spread(a: Array) -> Array:
        # The matrix unit multiplies bfloat16 in one pass, and float32 in six.
        precision = lax.Precision.DEFAULT if a.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
        return jnp.dot(a, ones.astype(a.dtype), precision=precision, preferred_element_type=jnp.float32)

    scales, zeros = of_groups
    is_finite = (jnp.abs(scales.astype(jnp.float32)) < jnp.inf) & (jnp.abs(zeros.astype(jnp.float32)) < jnp.inf)
    scale, zero = spread(jnp.where(is_finite, scales, NOT_FINITE)), spread(jnp.where(is_finite, zeros, 0))
    return jnp.where(scale == NOT_FINITE, jnp.nan, scale), zero
