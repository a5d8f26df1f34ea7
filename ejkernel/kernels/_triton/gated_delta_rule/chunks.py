"""What the kernels need of each chunk besides its tokens: the rows of the WY form, weights, and factors of rows.

With the norms |q_i| and |k_i| (1 if they are not divided by), G_i the sum of the log decays up to row i, and T that of
all rows,

    L_ij = β_i exp(G_i − G_j) k_i·k_j / (|k_i| |k_j|) for j < i
    A_ij = scale exp(G_i − G_j) q_i·k_j / (|q_i| |k_j|) for j ≤ i

The norms and decays of rows are factors, so that queries and keys enter products as they are, unrounded:

    k_since = exp(G) / |k|,    k_until = exp(T − G) / |k|,    q_since = scale exp(G) / |q|,    total = exp(T)

The rows x = β (v − k_since K h) determine all else. With u = (I + L)⁻¹ x, o = q_since Q h + A u and
h' = total h + Kᵀ (k_until u). Hence

    o = q_since Q h + A' x,    h' = total h + K'ᵀ x,    A' = A (I + L)⁻¹,    K' = (I + L)⁻ᵀ k_until K

Similar keys cancel within A' and K', which are rounded after that, and not in sums over rounded numbers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._recurrence import pairs, tiles
from ejkernel.kernels._triton._recurrence.problem import Places, Problem, problem_of
from ejkernel.primitives._recurrence import Operands as Recurrence
from ejkernel.primitives._recurrence import RecurrenceSpec
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec, Operands
from ejkernel.types.recurrence import RecurrenceConfig

NORM_EPSILON = tl.constexpr(1e-6)
WARPS = 4
BLOCK = tl.constexpr(16)
"""The size of the diagonal blocks that are inverted row by row: the smallest factor of a product."""


class Chunks(NamedTuple):
    """x_to_o, A' [b,chunks,h,C,C], and x_to_state, K' [b,s,h,d], in the dtype of products; k_since, k_until and q_since
    [b,s,h] and total [b,chunks,h] float32; for gradients (I + L)⁻¹ [b,chunks,h,C,C] float32, else None.
    """

    k_since: Any
    k_until: Any
    q_since: Any
    total: Any
    x_to_o: Any
    x_to_state: Any
    inverse: Any = None


def problem(x: Operands, spec: GatedDeltaRuleSpec, config: RecurrenceConfig) -> Problem:
    """The compile-time constants of a call: those of the linear recurrence with decays of heads."""
    of_decays = Recurrence(x.q, x.k, x.v, x.g, spans=x.spans)
    return problem_of(of_decays, RecurrenceSpec(softmax_scale=spec.softmax_scale), config.chunk_size)


def kept_dtype(p: Problem) -> Any:
    """The dtype of arrays that are kept for products."""
    return jnp.bfloat16 if p.dtype == tl.bfloat16 else jnp.float32


def rows_type(p: Problem) -> jax.ShapeDtypeStruct:
    """A number for each token and head."""
    return jax.ShapeDtypeStruct((p.B, p.S, p.H), jnp.float32)


def pairs_type(p: Problem, dtype: Any) -> jax.ShapeDtypeStruct:
    """A number for each pair of rows of a chunk."""
    return jax.ShapeDtypeStruct((p.B, p.chunks, p.H, p.C, p.C), dtype)


def chunks_of(
    x: Operands, spec: GatedDeltaRuleSpec, places: Places, p: Problem, config: RecurrenceConfig, *, for_gradients: bool
) -> Chunks:
    """The `Chunks` of a call."""
    rows, dtype = rows_type(p), kept_dtype(p)
    found = dict(
        inverse=pairs_type(p, jnp.float32),
        k_since=rows,
        k_until=rows,
        q_since=rows,
        total=jax.ShapeDtypeStruct((p.B, p.chunks, p.H), jnp.float32),
        x_to_o=pairs_type(p, dtype),
        x_to_state=jax.ShapeDtypeStruct((p.B, p.S, p.H, p.D), dtype),
    )
    if not for_gradients:
        del found["inverse"]
    return Chunks(
        **_launch.launch(
            chunk_kernel,
            *(x.q, x.k, x.beta, x.g, *places[:4]),
            out_type=found,
            grid=p.B * p.chunks * p.H,
            config=RecurrenceConfig(chunk_size=config.chunk_size, num_warps=WARPS, num_stages=1),
            p=p,
            NORMALISED=spec.use_qk_l2norm,
            **({} if for_gradients else {"inverse": None}),
        )
    )


@triton.jit
def chunk_kernel(
    q, k, beta, g, first, length, chunk, owner,
    inverse, k_since, k_until, q_since, total, x_to_o, x_to_state,
    p: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    batch, head, of_chunk, at, left = chunk_of_program(first, length, chunk, owner, p)
    if p.N is not None and left <= 0:  # the chunk of no sequence
        return
    q_tile, k_tile = queries_and_keys(q, k, batch, at, left, head, p)
    gate, G, U, T = tiles.gates(g, None, None, batch, at, left, head, 0, 1, p)
    q_norm, k_norm = inverse_norms(q_tile, NORMALISED, p) * p.scale, inverse_norms(k_tile, NORMALISED, p)
    until = grown(k_norm, U, p)
    store_rows(k_since, grown(k_norm, G, p), batch, at, left, head, p)
    store_rows(k_until, until, batch, at, left, head, p)
    store_rows(q_since, grown(q_norm, G, p), batch, at, left, head, p)
    tl.store(total + of_chunk, exp(T, p) if p.by_head else 1.0)

    decays = pairs.pair_decays(gate, G, p) * k_norm[None, :]
    lower = tiles.product(k_tile, tl.trans(k_tile), p) * decays
    lower *= (load_rows(beta, batch, at, left, head, p) * k_norm)[:, None]
    weights = tiles.product(q_tile, tl.trans(k_tile), p) * decays * q_norm[:, None]
    solved = unit_lower_inverse(strictly_lower(lower, p), p)
    if inverse is not None:
        store_pairs(inverse, solved, of_chunk, p)
    store_pairs(x_to_o, product(weights, solved, p), of_chunk, p)
    tile = tl.full([p.C, p.D_PAD], 0.0, tl.float32)
    tile = tiles.add_product(tile, tl.trans(solved * until[:, None]), k_tile, p, 1 if p.dtype == tl.float32 else 2)
    tiles.store_tile(x_to_state, tile, batch, at, left, head, p.H, 0, p.D, p.D_PAD, p)


@triton.jit
def unit_lower_inverse(lower, p: tl.constexpr):
    """(I + L)⁻¹ of a strictly lower triangular L [C,C]: of its diagonal blocks by elimination, and of two blocks by

    [A 0; B D]⁻¹ = [A⁻¹ 0; −D⁻¹ B A⁻¹ D⁻¹]
    """
    count: tl.constexpr = p.C // BLOCK
    row, block = tl.arange(0, BLOCK), tl.arange(0, count)
    of_block = (block[:, None] == block[None, :])[:, None, :, None]
    diagonal = tl.sum(tl.where(of_block, tl.reshape(lower, [count, BLOCK, count, BLOCK]), 0.0), 2)
    inverse = tl.where((row[:, None] == row[None, :])[None, :, :], 1.0, tl.zeros_like(diagonal))
    for i in tl.static_range(0, BLOCK - 1):
        column = tl.sum(tl.where((row == i)[None, None, :], diagonal, 0.0), 2)
        inverse -= column[:, :, None] * tl.sum(tl.where((row == i)[None, :, None], inverse, 0.0), 1)[:, None, :]
    whole = tl.reshape(tl.where(of_block, inverse[:, :, None, :], 0.0), [p.C, p.C])
    for level in tl.static_range(0, 7):
        if 2**level >= BLOCK and 2**level < p.C:
            whole = merged(whole, lower, 2**level, p)
    return whole


@triton.jit
def merged(inverse, lower, SIZE: tl.constexpr, p: tl.constexpr):
    """The inverses of blocks of 2·SIZE from those of blocks of SIZE."""
    block = tl.arange(0, p.C) // SIZE
    below = (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)
    return inverse - product(product(inverse, tl.where(below, lower, 0.0), p), inverse, p)


# --- Pieces that all kernels use --------------------------------------------------------------------------------------


@triton.jit
def chunk_of_program(first, length, chunk, owner, p: tl.constexpr):
    """Batch element and head of a program, the number of its chunk, the first token, and how many rows exist."""
    pid = tl.program_id(0)
    head, number, batch = pid % p.H, pid // p.H % p.chunks, pid // (p.H * p.chunks)
    at, left = tiles.chunk_at(batch, number, first, length, chunk, owner, p)
    return batch, head, pid, at, left


@triton.jit
def queries_and_keys(q, k, batch, at, left, head, p: tl.constexpr):
    """The tiles [C,D] of a head in the dtype of products, which holds them exactly."""
    q_tile = tiles.load_tile(q, batch, at, left, head // p.per_query, p.HQ, 0, p.D, p.D_PAD, p).to(p.dtype)
    return q_tile, tiles.load_tile(k, batch, at, left, head // p.per_key, p.HK, 0, p.D, p.D_PAD, p).to(p.dtype)


@triton.jit
def decays_of_pairs(g, batch, at, left, head, p: tl.constexpr):
    """exp(G_i − G_j) where j ≤ i, else 0 [C,C]."""
    gate, G, _, _ = tiles.gates(g, None, None, batch, at, left, head, 0, 1, p)
    return pairs.pair_decays(gate, G, p)


@triton.jit
def inverse_norms(tile, NORMALISED: tl.constexpr, p: tl.constexpr):
    """1 / √(Σ x² + 1e-6) of the rows, or 1."""
    if NORMALISED:
        wide = tile.to(tl.float32)
        return tl.rsqrt(tl.sum(wide * wide, 1) + NORM_EPSILON)
    else:
        return tl.full([p.C], 1.0, tl.float32)


@triton.jit
def grown(factor, exponent, p: tl.constexpr):
    """factor · exp(exponent) of rows; without decays the factor."""
    if p.by_head:
        return factor * exp(exponent, p)
    else:
        return factor


@triton.jit
def exp(x, p: tl.constexpr):
    """The exponential, for float32 inputs as exact as float32: the error of the instruction alone grows with x."""
    if p.exact:
        n = tl.floor(x * 1.4426950408889634 + 0.5)
        r = (x - n * 0.693359375) + n * 2.12194440e-4  # n ln 2 in two parts, the first of them exact
        return tl.exp(r) * tl.exp2(n)
    else:
        return tl.exp(x)


@triton.jit
def strictly_lower(tile, p: tl.constexpr):
    """The tile [C,C] with zeros on and above the diagonal."""
    rows = tl.arange(0, p.C)
    return tl.where(rows[:, None] > rows[None, :], tile, 0.0)


@triton.jit
def load_rows(ptr, batch, at, left, head, p: tl.constexpr):
    """The numbers [C] of the rows of a chunk in an array [b,s,h], float32; 0 for rows that do not exist."""
    address, exists = tiles.row_pointers(ptr, batch, at, left, head, p)
    return tl.load(address, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def store_rows(ptr, rows, batch, at, left, head, p: tl.constexpr):
    """Stores the numbers of the rows of a chunk."""
    address, exists = tiles.row_pointers(ptr, batch, at, left, head, p)
    tl.store(address, rows.to(ptr.dtype.element_ty), mask=exists)


@triton.jit
def pair_pointers(ptr, of_chunk, p: tl.constexpr):
    """Pointers to the pairs of rows [C,C] of a chunk."""
    rows = tl.arange(0, p.C)
    return ptr + tl.cast(of_chunk, tl.int64) * (p.C * p.C) + rows[:, None] * p.C + rows[None, :]


@triton.jit
def store_pairs(ptr, tile, of_chunk, p: tl.constexpr):
    """Stores a tile [C,C] of a chunk."""
    tl.store(pair_pointers(ptr, of_chunk, p), tile.to(ptr.dtype.element_ty))


@triton.jit
def product(a, b, p: tl.constexpr):
    """a·b of float32 tiles, each in two parts: the rounded value and its rounding error."""
    if p.dtype == tl.float32:
        return tl.dot(a, b, input_precision=p.precision)
    else:
        high = a.to(p.dtype)
        small = tl.dot((a - high.to(tl.float32)).to(p.dtype), b.to(p.dtype))
        return add_product(small, high, b, p)


@triton.jit
def add_product(total, a, b, p: tl.constexpr):
    """total + a·b for a float32 tile b in two parts."""
    if p.dtype == tl.float32:
        return tl.dot(a, b, total, input_precision=p.precision)
    else:
        high = b.to(p.dtype)
        return tl.dot(a, high, tl.dot(a, (b - high.to(tl.float32)).to(p.dtype), total))
