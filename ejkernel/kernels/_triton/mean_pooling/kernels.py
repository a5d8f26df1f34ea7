"""The kernels of mean_pooling: sums over parts of segments, and the gradient spread over their tokens.

A program has a part of one segment and some of the features. Where there are few long segments, each has several parts,
whose sums are added up in a second step, in order: every run gives the same bits. The gradient is written by the same
programs, and by those of two more segments, the tokens before the first and after the last, zero.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.mean_pooling import MeanPoolingSpec, Operands, Outputs
from ejkernel.types.mean_pooling import MeanPoolingConfig

LONG_PART, SHORT_PART = 512, 64
"""Tokens of a part: segments are as a rule not longer, and where programs are wanting may be cut down to the latter."""
ENOUGH_PROGRAMS = 4096


@dataclass(frozen=True)
class Problem:
    """The shapes of one call, as a compile-time constant.

    Attributes:
        B, S, D, N: batch, tokens, features, segments.
        parts: of each segment.
        segments_vary: whether segments has a batch axis.
    """

    B: int
    S: int
    D: int
    N: int
    parts: int
    segments_vary: bool


def mean_pooling(*operands: jax.Array | None, spec: MeanPoolingSpec, config: MeanPoolingConfig) -> Outputs:
    """o [b, n, d]."""
    return Outputs(_means(Operands(*operands), config))


def mean_pooling_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: MeanPoolingSpec, config: MeanPoolingConfig
) -> Outputs:
    """The tangent of o, which is linear in x."""
    return Outputs(_means(Operands(tangents.x, primals.segments), config))


def _means(operands: Operands, config: MeanPoolingConfig) -> jax.Array:
    x, segments = operands
    problem = _problem_of(x, segments, config)
    B, N, D = problem.B, problem.N, problem.D
    whole = problem.parts == 1
    sums = _launch.launch(
        sum_kernel,
        x,
        segments,
        out_type=jax.ShapeDtypeStruct(
            (B, N, D) if whole else (B, N, problem.parts, D), x.dtype if whole else jnp.float32
        ),
        grid=B * N * problem.parts * triton.cdiv(D, config.block_d),
        config=config,
        problem=problem,
        BLOCK_S=config.block_s,
        BLOCK_D=config.block_d,
    )
    if whole:
        return sums
    lengths = problem.S if segments is None else jnp.maximum(segments[..., 1:] - segments[..., :1], 1)
    return (sums.sum(2) / lengths).astype(x.dtype)


def mean_pooling_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: MeanPoolingSpec,
    config: MeanPoolingConfig,
) -> tuple[jax.Array]:
    """The cotangent of x [b, s, d]."""
    x, segments = primals
    problem = _problem_of(x, segments, config)
    count = problem.N + (0 if segments is None else 2)
    dx = _launch.launch(
        spread_kernel,
        cotangents.o,
        segments,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=problem.B * count * problem.parts * triton.cdiv(problem.D, config.block_d),
        config=config,
        problem=problem,
        COUNT=count,
        BLOCK_S=config.block_s,
        BLOCK_D=config.block_d,
    )
    return (dx,)


def _problem_of(x: jax.Array, segments: jax.Array | None, config: MeanPoolingConfig) -> Problem:
    (B, S, D), N = x.shape, 1 if segments is None else segments.shape[1]
    length, programs = S / max(1, N), B * N * triton.cdiv(D, config.block_d)
    parts = min(max(length / LONG_PART, ENOUGH_PROGRAMS / max(1, programs)), length / SHORT_PART)
    return Problem(B, S, D, N, max(1, math.ceil(parts)), segments is not None and segments.shape[0] > 1)


@triton.jit
def place(COUNT: tl.constexpr, problem: tl.constexpr, BLOCK_D: tl.constexpr):
    """Batch, segment, part and first feature of a program; neighbours have neighbouring features."""
    column_tiles: tl.constexpr = (problem.D + BLOCK_D - 1) // BLOCK_D
    program = tl.program_id(0)
    column, rest = program % column_tiles * BLOCK_D, program // column_tiles
    part, rest = rest % problem.parts, rest // problem.parts
    return rest // COUNT, rest % COUNT, part, column


@triton.jit
def ends_of(segments, batch, number, problem: tl.constexpr):
    """The first token of a segment and the one after its last."""
    if segments is None:
        start, end = 0, problem.S
    else:
        at = segments + 2 * ((batch if problem.segments_vary else 0) * problem.N + number)
        start, end = tl.load(at), tl.load(at + 1)
    return start, end


@triton.jit
def part_of(start, end, part, problem: tl.constexpr, BLOCK_S: tl.constexpr):
    """The tokens of one part, a whole number of tiles but in the last."""
    size = tl.cdiv(tl.cdiv(end - start, BLOCK_S), problem.parts) * BLOCK_S
    first = start + part * size
    return first, tl.minimum(first + size, end)


@triton.jit
def sum_kernel(
    x, segments,
    o,
    problem: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch, number, part, column = place(problem.N, problem, BLOCK_D)
    start, end = ends_of(segments, batch, number, problem)
    first, last = part_of(start, end, part, problem, BLOCK_S)
    columns = column + tl.arange(0, BLOCK_D)[None, :]
    row, at = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_S)[:, None] * problem.D + columns
    x += (batch.to(tl.int64) * problem.S + first) * problem.D
    total = tl.zeros([1, BLOCK_D], tl.float32)
    for token in tl.range(first, last, BLOCK_S):
        tile = tl.load(x + at, mask=(row < last - token) & (columns < problem.D), other=0.0)
        total += tl.sum(tile.to(tl.float32), axis=0, keep_dims=True)
        x += BLOCK_S * problem.D
    if problem.parts == 1:
        total /= tl.maximum(end - start, 1)
    o += ((batch * problem.N + number).to(tl.int64) * problem.parts + part) * problem.D
    tl.store(o + columns, total.to(o.dtype.element_ty), mask=columns < problem.D)


@triton.jit
def spread_kernel(
    do, segments,
    dx,
    problem: tl.constexpr, COUNT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch, number, part, column = place(COUNT, problem, BLOCK_D)
    segment = tl.minimum(number, problem.N - 1)
    start, end = ends_of(segments, batch, segment, problem)
    columns = column + tl.arange(0, BLOCK_D)[None, :]
    do += (batch * problem.N + segment).to(tl.int64) * problem.D
    share = tl.load(do + columns, mask=columns < problem.D, other=0.0).to(tl.float32) / tl.maximum(end - start, 1)
    if COUNT > problem.N:
        before, _ = ends_of(segments, batch, 0, problem)
        _, last_end = ends_of(segments, batch, problem.N - 1, problem)
        share = tl.where(number < problem.N, share, 0.0)
        start = tl.where(number < problem.N, start, tl.where(number == problem.N, 0, last_end))
        end = tl.where(number < problem.N, end, tl.where(number == problem.N, before, problem.S))
    first, last = part_of(start, end, part, problem, BLOCK_S)
    row, at = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_S)[:, None] * problem.D + columns
    dx += (batch.to(tl.int64) * problem.S + first) * problem.D
    tile = tl.broadcast_to(share.to(dx.dtype.element_ty), [BLOCK_S, BLOCK_D])
    for token in tl.range(first, last, BLOCK_S):
        tl.store(dx + at, tile, mask=(row < last - token) & (columns < problem.D))
        dx += BLOCK_S * problem.D
