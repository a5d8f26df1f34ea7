"""Tiles of queries, in which each row is one head of one query, and tiles of the keys of a block."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_of_program(problem: tl.constexpr, TILES: tl.constexpr):
    """The batch element, tile and group of a program; the tiles of a group are consecutive, the last tile first."""
    program = tl.program_id(0)
    tile, rest = TILES - 1 - program % TILES, program // TILES
    return (rest // problem.G).to(tl.int64), tile, rest % problem.G


@triton.jit
def rows_of(batch, query, group, problem: tl.constexpr, ROWS: tl.constexpr):
    """The index of each row of a tile [ROWS] in [b,s,h] and in [b,h,s], and whether the row exists."""
    head = tl.arange(0, ROWS) % problem.PADDED
    inside = (head < problem.heads) & (query < problem.S)
    of_group = group * problem.heads + head
    by_token = (batch * problem.S + query) * problem.H + of_group
    by_head = (batch * problem.H + of_group) * problem.S + query
    return by_token, by_head, inside


@triton.jit
def load_rows(x, row, inside, FEATURES: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of x [rows, features] as a tile [ROWS, WIDTH], 0 elsewhere; None if x is absent."""
    if x is None:
        return
    else:
        d = tl.arange(0, WIDTH)[None, :]
        return tl.load(x + row[:, None] * FEATURES + d, mask=inside[:, None] & (d < FEATURES), other=0.0)


@triton.jit
def store_rows(x, tile, row, inside, FEATURES: tl.constexpr, WIDTH: tl.constexpr):
    d = tl.arange(0, WIDTH)[None, :]
    tl.store(x + row[:, None] * FEATURES + d, tile.to(x.dtype.element_ty), mask=inside[:, None] & (d < FEATURES))


@triton.jit
def load_keys(x, batch, token, end, group, problem: tl.constexpr, FEATURES: tl.constexpr, WIDTH: tl.constexpr):
    """The tokens of x [b,t,g,features] before `end` as a tile [BLOCK_K, WIDTH], 0 elsewhere; None if x is absent."""
    if x is None:
        return
    else:
        d = tl.arange(0, WIDTH)[None, :]
        row = (batch * problem.K + token[:, None]) * problem.G + group
        return tl.load(x + row * FEATURES + d, mask=(token < end)[:, None] & (d < FEATURES), other=0.0)


@triton.jit
def product(x, y):
    """The product x·yᵀ of two tiles in float32."""
    return tl.dot(x, tl.trans(y), input_precision="ieee")


@triton.jit
def added(p, y, total):
    """total + p·y, with p rounded to the dtype of y."""
    return tl.dot(p.to(y.dtype), y, total, input_precision="ieee")


@triton.jit
def weights(product, lse, visible, problem: tl.constexpr):
    """exp(s − lse) from the products q·kᵀ of a tile and lse of base 2; 0 where not visible.

    It is computed as exp(−|s − lse|): near 10⁹ float32 resolves logits in steps of 64, and rounding may make s larger
    than lse by so much that the exponential overflows.
    """
    scale: tl.constexpr = problem.scale * LOG2E
    return tl.exp2(-tl.abs(tl.where(visible, product * scale - lse, float("-inf"))))


@triton.jit
def visible_rows(members, token, end, limit, problem: tl.constexpr, ROWS: tl.constexpr):
    """Which rows of a tile see which keys of a block: rows whose query lists the block, up to the query's own limit."""
    listed = (members >> (tl.arange(0, ROWS) // problem.PADDED)) & 1
    return (listed == 1)[:, None] & (token[None, :] < tl.minimum(limit, end)[:, None])
