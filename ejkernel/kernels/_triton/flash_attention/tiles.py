"""The pieces that the kernels of flash_attention are made of.

A program holds one block of queries (or of keys) of one head, and loops over the blocks of keys (or queries) that it
can see. Rows i and columns j count within the sequence. Index tensors are given as [rows, 1] and [1, columns], or the
other way round where a tile is held transposed: what is computed from them follows their shapes.

Every loop is one loop, which masks the tiles that are not seen whole, and stands in a branch that is taken if it is not
empty: where the accumulator of a loop that may be empty meets its initial value, ptxas gives up running the matrix
products asynchronously (its remark C7515).

A tile of WIDTH features is a tuple of the parts that `problem.parts` makes of them, so that 192 features cost three
quarters of what 256 cost: parts are multiplied one after the other, and summed where features are.

The frame of a program is where it works: (batch, head, sequence, q_start, q_len, k_start, k_len). In a dense call the
sequence is number 0, and begins at 0.
"""

import triton
import triton.language as tl

from .problem import parts


@triton.jit
def place(BLOCKS: tl.constexpr, HEADS: tl.constexpr):
    """The block, the head and the batch index of this program."""
    pid = tl.program_id(0)
    return pid % BLOCKS, pid // BLOCKS % HEADS, pid // (BLOCKS * HEADS)


@triton.jit
def queries_of_program(cu_q, cu_k, problem: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The block of queries that this program holds, the first of them in its sequence, and the frame."""
    block, head, batch = place(BLOCKS, problem.H)
    if problem.right is not None:
        block = BLOCKS - 1 - block  # the blocks that see most keys first
    first, sequence, q_start, q_len, k_start, k_len = sequence_of(
        block, batch, cu_q, cu_k, problem, BLOCK_Q, OF_KEYS=False
    )
    return block, first, (batch, head, sequence, q_start, q_len, k_start, k_len)


@triton.jit
def keys_of_queries(block, first, frame, spans, problem: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr,
                    BLOCK_K: tl.constexpr):  # fmt: skip
    """The bounds of the loop over keys, the first and the last tile that needs no mask, and which keys may be read."""
    batch, _, _, _, _, _, k_len = frame
    low, high = band(frame, problem)
    bounds = schedule(first, low, high, k_len, problem.left is not None, problem.right is not None, BLOCK_Q, BLOCK_K)
    begin, end, first_full, last_full = within_segments(bounds, spans, batch, block, BLOCKS, BLOCK_K)
    seen_begin, seen_end = seen_keys(frame, problem)
    return begin, end, first_full, last_full, seen_begin, seen_end


@triton.jit
def sequence_of(block, batch, cu_q, cu_k, problem: tl.constexpr, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr):
    """Where a block of queries (or keys) begins in its sequence, and (sequence, q_start, q_len, k_start, k_len).

    Blocks of a packed call are numbered through its sequences, of which sequence n has ceil(length_n / BLOCK). The
    tokens past the last sequence are treated as one more, which has no tokens on the other side.
    """
    if problem.N is None:
        return block * BLOCK, 0, 0, problem.S, 0, problem.K
    else:
        cu_q += batch * problem.cu_q_strides.b
        cu_k += batch * problem.cu_k_strides.b
        cu = cu_k if OF_KEYS else cu_q
        tokens: tl.constexpr = problem.K if OF_KEYS else problem.S
        n = tl.arange(0, problem.N_PAD)
        starts = tl.load(cu + n, mask=n <= problem.N, other=tokens)
        stops = tl.load(cu + n + 1, mask=n < problem.N, other=tokens)
        blocks = (stops - starts + BLOCK - 1) // BLOCK
        sequence = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
        first = (block - tl.sum(tl.where(n < sequence, blocks, 0), 0)) * BLOCK
        here = tl.minimum(sequence, problem.N)
        q_start, k_start = tl.load(cu_q + here), tl.load(cu_k + here)
        after = tl.minimum(sequence + 1, problem.N)
        q_stop, k_stop = tl.load(cu_q + after), tl.load(cu_k + after)
        if OF_KEYS:
            k_stop = tl.where(sequence == problem.N, tokens, k_stop)
        else:
            q_stop = tl.where(sequence == problem.N, tokens, q_stop)
        return first, sequence, q_start, q_stop - q_start, k_start, k_stop - k_start


@triton.jit
def schedule(first, low, high, length, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, HELD: tl.constexpr,
             STEP: tl.constexpr):  # fmt: skip
    """The bounds of a loop by STEP over the y in [0, length) with x + low ≤ y ≤ x + high for some x in
    [first, first + HELD); and the first and the last tile whose every y is seen by every x, which needs no mask.
    """
    begin, end, first_full, last_full = 0, length, 0, length - STEP
    if HAS_LOW:
        begin = tl.maximum(first + low, 0) // STEP * STEP
        first_full = first + HELD - 1 + low
    if HAS_HIGH:
        end = tl.minimum(end, first + HELD + high)
        last_full = tl.minimum(last_full, first + high + 1 - STEP)
    return begin, end, first_full, last_full


@triton.jit
def within_segments(bounds, spans, batch, block, BLOCKS: tl.constexpr, STEP: tl.constexpr):
    """What `schedule` returned, narrowed to what this block shares segments with (see kernels/_segments.py)."""
    begin, end, first_full, last_full = bounds
    if spans is not None:
        spans += (batch * BLOCKS + block) * 4
        begin, end = tl.maximum(begin, tl.load(spans)), tl.minimum(end, tl.load(spans + 1))
        first_full = tl.maximum(first_full, tl.load(spans + 2))
        last_full = tl.minimum(last_full, tl.load(spans + 3) - STEP)
    return begin, end, first_full, last_full


@triton.jit
def load_tile(ptr, first, begin, end, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
              CHECKED: tl.constexpr):  # fmt: skip
    """Rows first … first + ROWS of one head of a dense [·, HEADS, WIDTH] as a tile.

    Where CHECKED, rows outside of [begin, end) are not read, but zero.
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
    address, rows, columns = addresses(ptr, first, HEADS, WIDTH, ROWS, n)
    inside = (first + rows >= begin) & (first + rows < end)
    part: tl.constexpr = parts(WIDTH, ptr.dtype.element_ty == tl.float32)[n]
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
def store_tile(ptr, tile, first, length, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Stores what `load_tile` loads."""
    for n in tl.static_range(len(tile)):
        address, rows, columns = addresses(ptr, first, HEADS, WIDTH, ROWS, n)
        inside = (first + rows < length) & (columns < WIDTH)
        tl.store(address, tile[n].to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def joined(tile, part):
    """The tile with one more part."""
    return tile + (part,)  # noqa: RUF005 (Triton knows no starred expressions)


@triton.jit
def addresses(ptr, first, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, n: tl.constexpr):
    """Of part n of a tile, with its rows and columns."""
    part: tl.constexpr = parts(WIDTH, ptr.dtype.element_ty == tl.float32)[n]
    begin: tl.constexpr = part[0]
    width: tl.constexpr = part[1]
    stride: tl.constexpr = HEADS * WIDTH
    rows, columns = tl.arange(0, ROWS)[:, None], begin + tl.arange(0, width)[None, :]
    return ptr + tl.cast(first, tl.int64) * stride + (rows * stride + columns), rows, columns


@triton.jit
def zeros(ROWS: tl.constexpr, WIDTH: tl.constexpr, problem: tl.constexpr):
    """A tile to sum in."""
    tile = ()
    for n in tl.static_range(len(parts(WIDTH, problem.exact))):
        tile = joined(tile, tl.full([ROWS, parts(WIDTH, problem.exact)[n][1]], 0.0, tl.float32))
    return tile


@triton.jit
def scaled(tile, factor):
    """The tile times a number, or one for each row."""
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
    """total + x·y of two parts. In float32 the product is a sum of its own: errors grow with the length of a sum."""
    if total is None:
        return tl.dot(x, y, input_precision="ieee")
    elif x.dtype == tl.float32:
        return tl.fma(tl.dot(x, y, input_precision="ieee"), 1.0, total)  # Triton makes of + a longer sum
    else:
        return tl.dot(x, y, total)


@triton.jit
def over_features_and_tangent(x, x_dot, y, y_dot):
    """x·yᵀ and its tangent x_dot·yᵀ + x·y_dotᵀ; a tangent of None is zero."""
    total = tl.full([x[0].shape[0], y[0].shape[0]], 0.0, tl.float32)
    total_dot = total
    for n in tl.static_range(len(x)):  # part by part, each being read once for both
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


@triton.jit
def load_rows(ptr, first, length, ROWS: tl.constexpr, CHECKED: tl.constexpr, other):
    """Numbers first … first + ROWS of a vector."""
    rows = first + tl.arange(0, ROWS)
    if CHECKED:
        return tl.load(ptr + rows, mask=rows < length, other=other)
    else:
        return tl.load(ptr + rows)


@triton.jit
def at(ptr, batch, row, ROWS: tl.constexpr, head, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """The pointer to [batch, row, head, 0] of a dense [·, ROWS, HEADS, WIDTH]."""
    return ptr + ((tl.cast(batch, tl.int64) * ROWS + row) * HEADS + head) * WIDTH


@triton.jit
def of_queries(ptr, frame, problem: tl.constexpr, WIDTH: tl.constexpr):
    """The pointer to the first query of a frame in [B, S, H, WIDTH]."""
    batch, head, _, q_start, _, _, _ = frame
    return at(ptr, batch, q_start, problem.S, head, problem.H, WIDTH)


@triton.jit
def of_keys(ptr, frame, problem: tl.constexpr, WIDTH: tl.constexpr):
    """The pointer to the first key of a frame in [B, K, G, WIDTH]."""
    batch, head, _, _, _, k_start, _ = frame
    return at(ptr, batch, k_start, problem.K, head // problem.group, problem.G, WIDTH)


@triton.jit
def of_rows(ptr, frame, problem: tl.constexpr):
    """The pointer to the first query of a frame in [B, H, S]."""
    batch, head, _, q_start, _, _, _ = frame
    return at(ptr, batch, head, problem.H, q_start, problem.S, 1)


@triton.jit
def band(frame, problem: tl.constexpr):
    """The least and the greatest j − i that is seen; 0 where unbounded."""
    _, _, _, _, q_len, _, k_len = frame
    low = k_len - q_len - problem.left if problem.left is not None else 0
    high = k_len - q_len + problem.right if problem.right is not None else 0
    return low, high


@triton.jit
def seen_keys(frame, problem: tl.constexpr):
    """The bounds of the keys that the band shows to any query."""
    _, _, _, _, q_len, _, k_len = frame
    low, high = band(frame, problem)
    begin, end = 0, k_len
    if problem.left is not None:
        begin = tl.maximum(low, 0)
    if problem.right is not None:
        end = tl.minimum(end, q_len + high)
    return begin, end
