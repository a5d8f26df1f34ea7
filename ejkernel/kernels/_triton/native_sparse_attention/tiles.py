"""Tiles of queries, of which each row is one head of one query, and of the keys of a block."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_of_program(problem: tl.constexpr, TILES: tl.constexpr):
    """Batch element, tile and group of a program: the tiles of a group follow one another, the last ones first."""
    program = tl.program_id(0)
    tile, rest = TILES - 1 - program % TILES, program // TILES
    return (rest // problem.G).to(tl.int64), tile, rest % problem.G


@triton.jit
def rows_of(batch, query, group, problem: tl.constexpr, ROWS: tl.constexpr):
    """Of the query of each row [ROWS] the number of the row among [b,s,h] and among [b,h,s], and whether it is one."""
    head = tl.arange(0, ROWS) % problem.PADDED
    inside = (head < problem.heads) & (query < problem.S)
    of_group = group * problem.heads + head
    by_token = (batch * problem.S + query) * problem.H + of_group
    by_head = (batch * problem.H + of_group) * problem.S + query
    return by_token, by_head, inside


@triton.jit
def load_rows(x, row, inside, FEATURES: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] of x [rows, features], 0 elsewhere; None of what is absent."""
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
    """[BLOCK_K, WIDTH] of x [b,t,g,features] for the tokens before `end`, 0 elsewhere; None of what is absent."""
    if x is None:
        return
    else:
        d = tl.arange(0, WIDTH)[None, :]
        row = (batch * problem.K + token[:, None]) * problem.G + group
        return tl.load(x + row * FEATURES + d, mask=(token < end)[:, None] & (d < FEATURES), other=0.0)


@triton.jit
def product(x, y):
    """x·yᵀ in float32."""
    return tl.dot(x, tl.trans(y), input_precision="ieee")


@triton.jit
def added(p, y, total):
    """total + p·y, p in the dtype of y."""
    return tl.dot(p.to(y.dtype), y, total, input_precision="ieee")


@triton.jit
def weights(product, lse, visible, problem: tl.constexpr):
    """exp(s − lse) of the products of a tile, lse being of base 2; 0 where not visible.

    As exp(−|s − lse|): of logits near 10⁹ float32 keeps every 64th number, and s may be above lse by more than that.
    """
    scale: tl.constexpr = problem.scale * LOG2E
    return tl.exp2(-tl.abs(tl.where(visible, product * scale - lse[:, None], float("-inf"))))


@triton.jit
def visible_rows(members, token, end, limit, problem: tl.constexpr, ROWS: tl.constexpr):
    """Which rows of a tile see which of the keys: those of the queries that list the block, up to their own limit."""
    listed = (members >> (tl.arange(0, ROWS) // problem.PADDED)) & 1
    return (listed == 1)[:, None] & (token[None, :] < tl.minimum(limit, end)[:, None])
