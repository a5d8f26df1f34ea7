"""The kernel of quantized_matmul for few rows: codes become numbers in the registers in which `mma.sync` wants them.

What bounds such a product is the memory that the codes take, as long as each costs few instructions. So a lane reads
words from device memory into its registers and makes the weights there (fragments.py). They never are in shared memory,
and columns and features of a program are a matter of what is contiguous in device memory: each warp has columns of its
own, and all have the same features.
"""

import triton
import triton.language as tl

from .fragments import addends_in_ptx, constraints, float32s, mma, products_in_ptx


@triton.jit
def product_in_registers(x, w, scales, zeros, o, problem: tl.constexpr):
    WORDS: tl.constexpr = problem.words
    PER_WORD: tl.constexpr = problem.per_word
    WORDS_OF_ROW: tl.constexpr = problem.C // PER_WORD
    ROWS: tl.constexpr = 8 * problem.tiles
    ROW_TILES: tl.constexpr = (problem.M + ROWS - 1) // ROWS
    BLOCKS_OF_PART: tl.constexpr = (problem.blocks + problem.parts - 1) // problem.parts
    program = tl.program_id(0)
    tile, part = program % problem.programs_of_part, program // problem.programs_of_part
    first_row, first_column = tile % ROW_TILES * ROWS, tile // ROW_TILES * problem.columns
    thread = tl.arange(0, 32 * problem.warps)
    # Words beyond the end of a row are read again, and their columns not stored.
    word = tl.minimum(first_column // PER_WORD + thread // 4 * WORDS, WORDS_OF_ROW - WORDS)
    row = first_row + thread % 32 // 4
    sums = repeated(repeated(tl.zeros([32 * problem.warps], tl.float32), PER_WORD * 2 * problem.tiles), WORDS)
    lost = repeated(repeated(tl.zeros([32 * problem.warps], tl.float32), 4), problem.tiles)
    begin = part * BLOCKS_OF_PART
    end = tl.minimum(begin + BLOCKS_OF_PART, problem.blocks)
    if problem.ahead:
        ahead = operands_of(x, w, scales, zeros, begin, word, row, thread % 4, problem)
        for block in tl.range(begin, end):
            now = ahead
            ahead = operands_of(x, w, scales, zeros, tl.minimum(block + 1, end - 1), word, row, thread % 4, problem)
            sums, lost = added(sums, lost, now, problem)
    else:
        for block in tl.range(begin, end):
            now = operands_of(x, w, scales, zeros, block, word, row, thread % 4, problem)
            sums, lost = added(sums, lost, now, problem)
    store(o, sums, lost, part, first_row, first_column, problem)


@triton.jit
def repeated(x, N: tl.constexpr):
    """A tuple of x, N times."""
    xs = ()
    for _ in tl.static_range(N):
        xs = xs + (x,)
    return xs


@triton.jit
def operands_of(x, w, scales, zeros, block, word, row, t, problem: tl.constexpr):
    """For every step of a block of features: words of four rows, scales and zeros of two pairs of them, pairs of x."""
    WORDS: tl.constexpr = problem.words
    WORDS_OF_ROW: tl.constexpr = problem.C // problem.per_word
    GROUPS: tl.constexpr = problem.C // problem.group
    EVEN: tl.constexpr = problem.R % (16 * problem.steps) == 0
    PAIRS: tl.constexpr = min(4, 2 * problem.steps)  # of x, 16 bytes: a lane could not read more in one piece
    feature = block * (16 * problem.steps) + t * (4 * problem.steps)
    group = word * problem.per_word // problem.group
    of_word, of_group = feature.to(tl.int64) * WORDS_OF_ROW + word, feature.to(tl.int64) * GROUPS + group
    words, of_scales, of_zeros, pairs = (), (), (), ()
    for r in tl.static_range(4 * problem.steps):
        at = of_word + r * WORDS_OF_ROW
        if WORDS > 1:
            at = at[:, None] + tl.arange(0, WORDS)[None, :]
        if EVEN:
            words = words + (every(tl.load(w + at), WORDS),)
            of_scales = of_scales + (tl.load(scales + of_group + r * GROUPS),)
            of_zeros = of_zeros + (tl.load(zeros + of_group + r * GROUPS),)
        else:
            inside = feature + r < problem.R
            of_row = inside if WORDS == 1 else inside[:, None]
            words = words + (every(tl.load(w + at, mask=of_row, other=0), WORDS),)
            of_scales = of_scales + (tl.load(scales + of_group + r * GROUPS, mask=inside, other=0.0),)
            of_zeros = of_zeros + (tl.load(zeros + of_group + r * GROUPS, mask=inside, other=0.0),)
    for q in tl.static_range(0, problem.tiles * 1):
        of_tile = ()
        for n in tl.static_range(0, (problem.steps + 1) // 2):
            pair = feature[:, None] // 2 + 4 * n + tl.arange(0, PAIRS)[None, :]
            at = (row + 8 * q).to(tl.int64)[:, None] * (problem.R // 2) + pair
            inside = (row + 8 * q < problem.M)[:, None] & (pair < problem.R // 2)
            of_tile = of_tile + every(tl.load(x.to(tl.pointer_type(tl.uint32)) + at, mask=inside, other=0), PAIRS)
        pairs = pairs + (of_tile,)
    return words, of_scales, of_zeros, pairs


@triton.jit
def every(x, N: tl.constexpr):
    """The N columns of x as a tuple."""
    if len(x.shape) == 1:
        return (x,)
    elif N == 2:
        return tl.split(x)
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], N // 2, 2]))
        even, odd = every(even, N // 2), every(odd, N // 2)
        xs = ()
        for n in tl.static_range(N // 2):
            xs = xs + (even[n], odd[n])
        return xs


@triton.jit
def added(sums, lost, operands, problem: tl.constexpr):
    """The sums of every word, and what rounding a has lost of them, with the products of a block of features."""
    words, scales, zeros, pairs = operands
    for n in tl.static_range(0, problem.steps * 1):
        of_rows = ()
        for q in tl.static_range(0, problem.tiles * 1):
            of_rows = of_rows + (pairs[q][2 * n], pairs[q][2 * n + 1])
        quad, of_scales, of_zeros = four(words, n), four(scales, n), four(zeros, n)
        if problem.ptx:
            scales_and_a, a_lost = addends(of_scales, of_zeros, problem)
            lost = every_tile(lost, a_lost, of_rows, problem)
            sums = every_word(sums, quad, scales_and_a, of_rows, problem)
        else:
            sums = in_plain_triton(sums, quad, of_scales, of_zeros, of_rows, problem)
    return sums, lost


@triton.jit
def four(xs, N: tl.constexpr):
    return xs[4 * N], xs[4 * N + 1], xs[4 * N + 2], xs[4 * N + 3]


@triton.jit
def addends(scales, zeros, problem: tl.constexpr):
    """Of two pairs of rows: the scales and a, one after the other; and what rounding a has lost."""
    s, a, lost = (), (), ()
    for pair in tl.static_range(2):
        of_pair = packed(scales[2 * pair], scales[2 * pair + 1])
        zero = packed(zeros[2 * pair], zeros[2 * pair + 1])
        rounded, rest = tl.inline_asm_elementwise(
            addends_in_ptx(problem), "=r,=r,r,r", (of_pair, zero), dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1
        )
        s, a, lost = s + (of_pair,), a + (rounded,), lost + (rest,)
    return s + a, lost


@triton.jit
def packed(first, second):
    """Two numbers of 16 bits in a word."""
    first, second = first.to(tl.uint16, bitcast=True), second.to(tl.uint16, bitcast=True)
    return first.to(tl.uint32) | (second.to(tl.uint32) << 16)


@triton.jit
def every_tile(lost, a, of_rows, problem: tl.constexpr):
    """Rows of a product that are all alike, for every tile of rows of x."""
    found = ()
    for q in tl.static_range(0, problem.tiles * 1):
        operands = (a[0], a[0], a[1], a[1], of_rows[2 * q], of_rows[2 * q + 1]) + lost[q]
        of_tile = tl.inline_asm_elementwise(
            mma(problem, "$0 $1 $2 $3", "$4 $5 $6 $7", "$8 $9", "$10 $11 $12 $13"),
            constraints(6, 4),
            operands,
            dtype=float32s(4),
            is_pure=True,
            pack=1,
        )
        found = found + (of_tile,)
    return found


@triton.jit
def every_word(sums, words, scales_and_a, of_rows, problem: tl.constexpr):
    """The products of the columns of every word with the rows of x."""
    found = ()
    for n in tl.static_range(0, problem.words * 1):
        operands = (words[0][n], words[1][n], words[2][n], words[3][n]) + scales_and_a + of_rows + sums[n]
        of_word = tl.inline_asm_elementwise(
            products_in_ptx(problem),
            constraints(8 + len(of_rows), len(sums[n])),
            operands,
            dtype=float32s(len(sums[n])),
            is_pure=True,
            pack=1,
        )
        found = found + (of_word,)
    return found


@triton.jit
def store(o, sums, lost, part, first_row, first_column, problem: tl.constexpr):
    """The sums to o [parts, M, C]: a lane has two rows of x a tile, and of each the columns of its words."""
    PER_WORD: tl.constexpr = problem.per_word
    COLUMNS: tl.constexpr = problem.words * PER_WORD
    xs = ()
    for q in tl.static_range(0, problem.tiles * 1):
        for second in tl.static_range(2):
            for n in tl.static_range(0, problem.words * 1):
                for code in tl.static_range(0, problem.per_word * 1):
                    xs = xs + (sums[n][(2 * q + second) * PER_WORD + code] + lost[q][second],)
    thread = tl.arange(0, 32 * problem.warps)[:, None]
    index = tl.arange(0, 2 * problem.tiles * COLUMNS)[None, :]
    row = first_row + index // (2 * COLUMNS) * 8 + thread % 4 * 2 + index // COLUMNS % 2
    column = first_column + thread // 4 * COLUMNS + index % COLUMNS
    found = tl.reshape(joined(xs, 0, 1), [32 * problem.warps, 2 * problem.tiles * COLUMNS])
    at = (part * problem.M + row).to(tl.int64) * problem.C + column
    tl.store(o + at, found.to(o.dtype.element_ty), mask=(row < problem.M) & (column < problem.C))


@triton.jit
def joined(xs, FIRST: tl.constexpr, STEP: tl.constexpr):
    """Every STEP-th of xs from FIRST on, along new axes of 2."""
    if len(xs) == STEP:
        return xs[FIRST]
    else:
        return tl.join(joined(xs, FIRST, 2 * STEP), joined(xs, FIRST + STEP, 2 * STEP))


@triton.jit
def in_plain_triton(sums, words, scales, zeros, of_rows, problem: tl.constexpr):
    """The sums with the products of 16 features, lane by lane as `mma.sync` has them."""
    PER_WORD: tl.constexpr = problem.per_word
    found = ()
    for n in tl.static_range(0, problem.words * 1):
        even, odd = (), ()
        for q in tl.static_range(0, problem.tiles * 1):
            for code in tl.static_range(0, problem.per_word * 1):
                first, second = sums[n][2 * q * PER_WORD + code], sums[n][(2 * q + 1) * PER_WORD + code]
                for r in tl.static_range(4):
                    number = ((words[r][n] >> (code * problem.bits)) & ((1 << problem.bits) - 1)).to(tl.float32)
                    weight = ((number - zeros[r]) * scales[r]).to(zeros[r].dtype)
                    pair = of_rows[2 * q + r // 2]
                    of_x = (pair >> (r % 2 * 16)).to(tl.uint16).to(zeros[r].dtype, bitcast=True)
                    a, b = product_of_lanes(weight, of_x, problem)
                    first, second = first + a, second + b
                even, odd = even + (first,), odd + (second,)
        of_word = ()
        for q in tl.static_range(0, problem.tiles * 1):
            for code in tl.static_range(0, problem.per_word * 1):
                of_word = of_word + (even[q * PER_WORD + code],)
            for code in tl.static_range(0, problem.per_word * 1):
                of_word = of_word + (odd[q * PER_WORD + code],)
        found = found + (of_word,)
    return found


@triton.jit
def product_of_lanes(a, b, problem: tl.constexpr):
    """Σ over t of a (g, t) · b (g′, t), for g′ = 2t and 2t + 1 in lane (g, t)."""
    a = tl.reshape(a.to(tl.float32), [problem.warps, 8, 1, 4])
    b = tl.reshape(b.to(tl.float32), [problem.warps, 1, 8, 4])
    first, second = tl.split(tl.reshape(tl.sum(a * b, 3), [problem.warps, 8, 4, 2]))
    return tl.reshape(first, [32 * problem.warps]), tl.reshape(second, [32 * problem.warps])
