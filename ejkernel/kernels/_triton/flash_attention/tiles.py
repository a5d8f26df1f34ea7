"""The pieces that the kernels of flash_attention are made of.

Index tensors are given as [rows, 1] and [1, columns], or the other way round where a tile is transposed: what is
computed from them follows their shapes.

Each kernel has a single loop, which masks only those tiles that are not full, inside a branch that is taken unless the
loop is empty: if the accumulator could also come from an empty loop, ptxas would serialise the asynchronous matrix
products (its remark C7515).

A tile of WIDTH features is a tuple of the parts that `problem.parts` gives, so that 192 features cost three quarters of
what 256 cost: parts are multiplied one after the other, and added up in sums over features.
"""

import triton
import triton.language as tl

from .problem import parts
from .sequence_info import first_seeing_query, of_keys, of_queries, of_rows, visible_keys


@triton.jit
def load_queries(ptr, first, info, problem: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                 CHECKED: tl.constexpr):  # fmt: skip
    """A tile of [B, S, H, WIDTH] that begins at query `first` of the sequence; None if the array is absent."""
    if ptr is None:
        return
    else:
        ptr = of_queries(ptr, info, problem, WIDTH)
        return load_tile(ptr, first, 0, info.q_len, problem.H, WIDTH, ROWS, CHECKED)


@triton.jit
def load_seeing_queries(ptr, first, info, problem: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                        CHECKED: tl.constexpr):  # fmt: skip
    """As `load_queries`, with zeros for queries that see no key within the band."""
    begin = first_seeing_query(info, problem)
    ptr = of_queries(ptr, info, problem, WIDTH)
    return load_tile(ptr, first, begin, info.q_len, problem.H, WIDTH, ROWS, CHECKED)


@triton.jit
def load_keys(ptr, first, info, problem: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
              CHECKED: tl.constexpr):  # fmt: skip
    """A tile of [B, K, G, WIDTH] that begins at key `first` of the sequence; None if the array is absent."""
    if ptr is None:
        return
    else:
        begin, end = visible_keys(info, problem)
        ptr = of_keys(ptr, info, problem, WIDTH)
        return load_tile(ptr, first, begin, end, problem.G, WIDTH, ROWS, CHECKED)


@triton.jit
def load_rows(ptr, first, i, info, problem: tl.constexpr, CHECKED: tl.constexpr, other):
    """The values of [B, H, S] at the queries i, which begin at `first`, in the shape of i; None if absent."""
    if ptr is None:
        return
    else:
        rows = first + tl.arange(0, i.numel)
        ptr = of_rows(ptr, info, problem) + rows
        return expanded(tl.load(ptr, mask=rows < info.q_len, other=other) if CHECKED else tl.load(ptr), i)


@triton.jit
def expanded(x, i):
    """A vector broadcast along the axis that i has besides its own."""
    if len(i.shape) == 1:
        return x
    elif i.shape[0] == 1:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def store_queries(ptr, tile, first, info, problem: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Stores a tile where `load_queries` would load it."""
    ptr = of_queries(ptr, info, problem, WIDTH)
    store_tile(ptr, tile, first, info.q_len, problem.H, WIDTH, ROWS, problem.exact)


@triton.jit
def store_keys(ptr, tile, first, info, problem: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Stores a tile where `load_keys` would load it; does nothing if the result is not asked for."""
    if ptr is not None:
        ptr = of_keys(ptr, info, problem, WIDTH)
        store_tile(ptr, tile, first, info.k_len, problem.G, WIDTH, ROWS, problem.exact)


@triton.jit
def store_rows(ptr, rows, i, info, problem: tl.constexpr):
    """Stores a value per row where `load_rows` would load it."""
    tl.store(of_rows(ptr, info, problem) + i, rows, mask=i < info.q_len)


@triton.jit
def load_tile(ptr, first, begin, end, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
              CHECKED: tl.constexpr):  # fmt: skip
    """Rows first … first + ROWS of one head of a dense [·, HEADS, WIDTH] as a tile.

    If CHECKED, rows outside of [begin, end) are zero, and not read.
    """
    tile = ()
    exact: tl.constexpr = ptr.dtype.element_ty == tl.float32
    for n in tl.static_range(len(parts(WIDTH, exact))):
        tile = joined(tile, load_part(ptr, first, begin, end, HEADS, WIDTH, ROWS, CHECKED, n))
    return tile


@triton.jit
def load_part(ptr, first, begin, end, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
              CHECKED: tl.constexpr, n: tl.constexpr):  # fmt: skip
    """Part n of `load_tile`."""
    exact: tl.constexpr = ptr.dtype.element_ty == tl.float32
    address, rows, columns = addresses(ptr, first, HEADS, WIDTH, ROWS, exact, n)
    inside = (first + rows >= begin) & (first + rows < end)
    part: tl.constexpr = parts(WIDTH, exact)[n]
    padded: tl.constexpr = part[0] + part[1] > WIDTH
    if CHECKED and padded:
        return tl.load(address, mask=inside & (columns < WIDTH), other=0.0)
    elif CHECKED:
        return tl.load(address, mask=inside, other=0.0)
    elif padded:
        return tl.load(address, mask=columns < WIDTH, other=0.0)
    else:
        return tl.load(address)


@triton.jit
def store_tile(ptr, tile, first, length, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
               EXACT: tl.constexpr):  # fmt: skip
    """Stores a tile, whose parts are those of float32 if EXACT, where `load_tile` would load it."""
    for n in tl.static_range(len(tile)):
        address, rows, columns = addresses(ptr, first, HEADS, WIDTH, ROWS, EXACT, n)
        inside = (first + rows < length) & (columns < WIDTH)
        tl.store(address, tile[n].to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def joined(tile, part):
    """The tile with one more part."""
    return tile + (part,)  # noqa: RUF005 (Triton knows no starred expressions)


@triton.jit
def addresses(ptr, first, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr,
              n: tl.constexpr):  # fmt: skip
    """The pointers of part n of a tile, and its rows and columns."""
    part: tl.constexpr = parts(WIDTH, EXACT)[n]
    begin: tl.constexpr = part[0]
    width: tl.constexpr = part[1]
    stride: tl.constexpr = HEADS * WIDTH
    rows, columns = tl.arange(0, ROWS)[:, None], begin + tl.arange(0, width)[None, :]
    return ptr + tl.cast(first, tl.int64) * stride + (rows * stride + columns), rows, columns


@triton.jit
def zeros(ROWS: tl.constexpr, WIDTH: tl.constexpr, problem: tl.constexpr):
    """A tile of zeros, to accumulate in."""
    tile = ()
    for n in tl.static_range(len(parts(WIDTH, problem.exact))):
        tile = joined(tile, tl.full([ROWS, parts(WIDTH, problem.exact)[n][1]], 0.0, tl.float32))
    return tile


@triton.jit
def scaled(tile, factor):
    """tile·factor, for a factor that is one number or one per row."""
    result = ()
    for n in tl.static_range(len(tile)):
        result = joined(result, tile[n] * factor)
    return result


@triton.jit
def less(tile, factor, other):
    """tile − factor·other, in float32."""
    result = ()
    for n in tl.static_range(len(tile)):
        result = joined(result, tile[n] - factor * other[n].to(tl.float32))
    return result


@triton.jit
def over_features(x, y, total):
    """total + x·yᵀ of two tiles; a total of None is zero."""
    for n in tl.static_range(len(x)):
        total = plus_product(total, x[n], y[n].T)
    return total


@triton.jit
def plus_product(total, x, y):
    """total + x·y of two parts; in float32 x·y is summed separately first, as errors grow with the length of a sum."""
    if total is None:
        return tl.dot(x, y, input_precision="ieee")
    elif x.dtype == tl.float32:
        return tl.fma(tl.dot(x, y, input_precision="ieee"), 1.0, total)  # with + Triton would accumulate into total
    else:
        return tl.dot(x, y, total)


@triton.jit
def over_features_and_tangent(x, x_dot, y, y_dot):
    """x·yᵀ and its tangent x_dot·yᵀ + x·y_dotᵀ; a tangent of None is zero."""
    total = tl.full([x[0].shape[0], y[0].shape[0]], 0.0, tl.float32)
    total_dot = total
    for n in tl.static_range(len(x)):  # part by part, so that each is read once for both products
        total = over_features((x[n],), (y[n],), total)
        if x_dot is not None:
            total_dot = over_features((x_dot[n],), (y[n],), total_dot)
        if y_dot is not None:
            total_dot = over_features((x[n],), (y_dot[n],), total_dot)
    return total, total_dot


@triton.jit
def over_tokens(weights, x, total):
    """total + weights·x, the weights rounded to the type of the tile x."""
    result = ()
    for n in tl.static_range(len(x)):
        result = joined(result, plus_product(total[n], weights.to(x[n].dtype), x[n]))
    return result
