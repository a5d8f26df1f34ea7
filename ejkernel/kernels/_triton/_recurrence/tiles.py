"""The pieces that the kernels of the linear recurrence are made of.

Rows are the tokens of a chunk in order of time: row r of a chunk that begins at token t is token t + step·r. Rows from
`length` on do not exist; they are read as zeros, log decays included, so that they leave the state unchanged.

`gate` is the log decays of the rows. G_r is their sum up to row r, U_r the sum of those after r, T the sum of all. They
are [C] with a number T for decays of heads, and [C, D] with T [D] for decays of features.
"""

import triton
import triton.language as tl

# The least log decay that is kept: its exp is 0 in float32, as is that of any smaller one.
LEAST_GATE = tl.constexpr(-128.0)


@triton.jit
def sequence_at(batch, n, first, length, chunk, p: tl.constexpr):
    """First token in time, number of tokens and first chunk of sequence n."""
    if p.N is None:
        tokens: tl.constexpr = p.S
        return (tokens - 1 if p.reverse else 0), tokens, 0
    else:
        at = batch * p.N + n
        return tl.load(first + at), tl.load(length + at), tl.load(chunk + at)


@triton.jit
def chunk_at(batch, number, first, length, chunk, owner, p: tl.constexpr):
    """First token in time of a chunk, and how many of its rows exist."""
    if p.N is None:
        start = number * p.C
        return (p.S - 1 - start if p.reverse else start), p.S - start
    else:
        n = tl.load(owner + batch * p.chunks + number)
        token, tokens, first_chunk = sequence_at(batch, tl.minimum(n, p.N - 1), first, length, chunk, p)
        start = (number - first_chunk) * p.C
        return token + p.step * start, tl.where(n < p.N, tokens - start, 0)


@triton.jit
def load_tile(ptr, batch, token, length, head, HEADS: tl.constexpr, column, WIDTH: tl.constexpr, PADDED: tl.constexpr,
              p: tl.constexpr):  # fmt: skip
    """Rows of a chunk and columns from `column` on of an array [b,s,heads,WIDTH], as a tile [C, PADDED]."""
    rows, columns = tl.arange(0, p.C), column + tl.arange(0, PADDED)
    row = (tl.cast(batch, tl.int64) * p.S + token) * HEADS + head
    address = ptr + row * WIDTH + (rows * (p.step * HEADS * WIDTH))[:, None] + columns[None, :]
    return tl.load(address, mask=(rows < length)[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def store_tile(ptr, tile, batch, token, length, head, HEADS: tl.constexpr, column, WIDTH: tl.constexpr,
               PADDED: tl.constexpr, p: tl.constexpr):  # fmt: skip
    """Stores a tile where `load_tile` would load it."""
    rows, columns = tl.arange(0, p.C), column + tl.arange(0, PADDED)
    row = (tl.cast(batch, tl.int64) * p.S + token) * HEADS + head
    address = ptr + row * WIDTH + (rows * (p.step * HEADS * WIDTH))[:, None] + columns[None, :]
    tl.store(address, tile.to(ptr.dtype.element_ty), mask=(rows < length)[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def row_pointers(ptr, batch, token, length, head, p: tl.constexpr):
    """Pointers to the elements of the rows of a chunk in an array [b,s,h], and which rows exist."""
    rows = tl.arange(0, p.C)
    at = (tl.cast(batch, tl.int64) * p.S + token) * p.H + head + rows * (p.step * p.H)
    return ptr + at, rows < length


@triton.jit
def load_row_factors(ptr, batch, token, length, head, p: tl.constexpr):
    """The factors [C,1] of the rows of a chunk, from an array [b,s,h]; float32."""
    address, exists = row_pointers(ptr, batch, token, length, head, p)
    return tl.load(address, mask=exists, other=0.0).to(tl.float32)[:, None]


@triton.jit
def state_pointers(ptr, number, row, ROWS: tl.constexpr, column, COLUMNS: tl.constexpr, p: tl.constexpr):
    """Pointers to a block of state `number` in an array [·,D,V], and which elements exist."""
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    address = ptr + tl.cast(number, tl.int64) * (p.D * p.V)
    if p.transposed:
        address += rows[:, None] + columns[None, :] * p.D
    else:
        address += rows[:, None] * p.V + columns[None, :]
    return address, (rows < p.D)[:, None] & (columns < p.V)[None, :]


@triton.jit
def load_state(ptr, number, row, ROWS: tl.constexpr, column, COLUMNS: tl.constexpr, p: tl.constexpr):
    """A block of state `number` of an array [·,D,V]."""
    address, exists = state_pointers(ptr, number, row, ROWS, column, COLUMNS, p)
    return tl.load(address, mask=exists, other=0.0)


@triton.jit
def first_state(ptr, number, row, ROWS: tl.constexpr, column, COLUMNS: tl.constexpr, p: tl.constexpr):
    """A block of the initial state of a sequence, zeros if none is given; float32."""
    state = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    if ptr is not None:
        state += load_state(ptr, number, row, ROWS, column, COLUMNS, p)
    return state


@triton.jit
def gates(
    g, gk, g_gamma, batch, token, length, head, column,
    COLUMNS: tl.constexpr, p: tl.constexpr, ARE_TANGENTS: tl.constexpr = False,
):  # fmt: skip
    """gate, G, U and T of a chunk; zeros without decays."""
    rows = tl.arange(0, p.C)
    by_head = tl.full([p.C], 0.0, tl.float32)
    if g is not None:
        address, exists = row_pointers(g, batch, token, length, head, p)
        by_head += tl.load(address, mask=exists, other=0.0).to(tl.float32)
    if g_gamma is not None:
        by_head += tl.where(rows < length, tl.load(g_gamma + batch * p.H + head), 0.0)
    if p.by_feature:
        gate = tl.full([p.C, COLUMNS], 0.0, tl.float32)
        if gk is not None:
            given = load_tile(gk, batch, token, length, head, p.H, column, p.D, COLUMNS, p)
            gate += given.to(tl.float32)
        if g is not None or g_gamma is not None:
            gate += by_head[:, None]
        gate = gate if ARE_TANGENTS else finite(gate)
        T = tl.sum(gate, 0)
        if p.sums_by_product and g is None and g_gamma is None and given.dtype == tl.bfloat16:
            G = tl.dot(causal_mask(p).to(tl.bfloat16), gate.to(tl.bfloat16))  # products with 1 and 0 are exact
        else:
            G = tl.cumsum(gate, 0)
        return gate, G, (sum_where(rows[:, None] < rows[None, :], gate, p) if p.exact else T[None, :] - G), T
    elif p.by_head and g is None:
        gamma, tokens = tl.load(g_gamma + batch * p.H + head), tl.minimum(length, p.C)
        gamma = gamma if ARE_TANGENTS else finite(gamma)
        G, U = gamma * tl.minimum(rows + 1, tokens), gamma * tl.maximum(tokens - 1 - rows, 0)
        return by_head, G, U, gamma * tokens
    elif p.by_head:
        by_head = by_head if ARE_TANGENTS else finite(by_head)
        G, T = tl.cumsum(by_head, 0), tl.sum(by_head, 0)
        return by_head, G, sum_where(rows[:, None] < rows[None, :], by_head, p), T
    else:
        return 0.0, 0.0, 0.0, 0.0


@triton.jit
def finite(gate):
    """A log decay bounded from below, so that no difference of sums is −∞ − (−∞)."""
    return tl.maximum(gate, LEAST_GATE, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sum_where(chosen, x, p: tl.constexpr):
    """Σ x_j over the rows j chosen for row i by a mask [C, C]; not as a difference of sums, which may be far larger."""
    if p.by_feature:
        return tl.dot(chosen.to(tl.float32), x, input_precision="ieee")
    else:
        return tl.sum(tl.where(chosen, x[None, :], 0.0), 1)


@triton.jit
def times(tile, exponent, p: tl.constexpr):
    """tile ∘ exp(exponent), for an exponent of the shape of G; float32."""
    if p.by_feature:
        return tile.to(tl.float32) * tl.exp(exponent)
    elif p.by_head:
        return tile.to(tl.float32) * tl.exp(exponent)[:, None]
    else:
        return tile.to(tl.float32)


@triton.jit
def decayed(state, T, p: tl.constexpr):
    """exp(T) h, for the initial state h [D, ·] of a chunk."""
    if p.by_feature:
        return state * tl.exp(T)[:, None]
    elif p.by_head:
        return state * tl.exp(T)
    else:
        return state


@triton.jit
def causal_mask(p: tl.constexpr):
    """Whether j ≤ i, for rows i and columns j [C, C]."""
    rows = tl.arange(0, p.C)
    return rows[:, None] >= rows[None, :]


@triton.jit
def product(a, b, p: tl.constexpr):
    return tl.dot(a, b, input_precision=p.precision)


@triton.jit
def add_product(total, a, b, p: tl.constexpr, PARTS: tl.constexpr):
    """total + a·b, with the float32 tile `a` in PARTS parts: the rounded value, its rounding error, …"""
    for _ in tl.static_range(PARTS):
        part = a.to(p.dtype)
        total = tl.dot(part, b, total, input_precision=p.precision)
        a -= part.to(tl.float32)
    return total


@triton.jit
def add_tokens(state, x, y, exponent, factor, p: tl.constexpr, PRECISE: tl.constexpr, PARTS: tl.constexpr = 1):
    """state + factor Σ_j exp(exponent_j) x_j y_jᵀ; PRECISE is for a state that is returned in float32.

    The exponential multiplies x if features decay, and otherwise the narrower of x and y; the other one is used as it
    is, and has to be exact in the dtype of products. Matrix units truncate sums to float32: with PRECISE the products
    of small parts are therefore summed first, and the state is added after the product. Without it the factor that is
    rounded enters in PARTS parts.
    """
    of_x: tl.constexpr = p.by_feature or (x.shape[1] < y.shape[1] and y.dtype == p.dtype)
    if of_x:
        wide, other = times(x, exponent, p) * factor, y.to(p.dtype)
    else:
        wide, other = times(y, exponent, p) * factor, x.to(p.dtype)
    high = wide.to(p.dtype)
    if p.dtype == tl.float32:
        return outer(high, other, state, of_x, p)
    middle = (wide - high.to(tl.float32)).to(p.dtype)
    if PRECISE:
        low = (wide - high.to(tl.float32) - middle.to(tl.float32)).to(p.dtype)
        total = outer(middle, other, outer(low, other, None, of_x, p), of_x, p)
        return state + outer(high, other, total, of_x, p)
    if p.weight_parts == 2 or PARTS == 2:
        state = outer(middle, other, state, of_x, p)
    return outer(high, other, state, of_x, p)


@triton.jit
def outer(wide, other, total, of_x: tl.constexpr, p: tl.constexpr):
    """total + Σ_j x_j y_jᵀ, where `wide` is x (of_x) or y, and `other` the other one."""
    if of_x:
        return tl.dot(tl.trans(wide), other, total, input_precision=p.precision)
    else:
        return tl.dot(tl.trans(other), wide, total, input_precision=p.precision)
