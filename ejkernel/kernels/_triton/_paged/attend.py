"""One tile of keys and values of a paged cache: addresses of its slots, logits, and the online softmax.

Keys and values of eight bits are read in pairs of features, whose first and second become two tiles in float16: so a
tile of values is transposed by the hardware in sixteen bits, and conversions take few instructions. q is scaled by a
power of two for each row, so that it fits float16.
"""

import triton
import triton.language as tl

from .drafts import is_drafted
from .softmax import LOG2E

# e4m3 in float16, as `float16_of_e4m3` has it: of the lower and of the upper bytes of two words of sixteen bits. In NaN
# alone a 1 added to the mantissa gives bit 14; bit 13 makes its product NaN again.
E4M3_IN_PTX = tl.constexpr("""{
.reg .b32 magnitude, sign, carry, scale;
mov.b32 scale, 0x5C005C00;
shl.b32 magnitude, $2, 7;
and.b32 magnitude, magnitude, 0x3F803F80;
shl.b32 sign, $2, 8;
lop3.b32 $0, sign, 0x80008000, magnitude, 0xEA;
mul.f16x2 $0, $0, scale;
add.u32 carry, magnitude, 0x00800080;
shr.u32 carry, carry, 1;
lop3.b32 $0, carry, 0x20002000, $0, 0xEA;
shr.u32 magnitude, $2, 1;
and.b32 magnitude, magnitude, 0x3F803F80;
lop3.b32 $1, $2, 0x80008000, magnitude, 0xEA;
mul.f16x2 $1, $1, scale;
add.u32 carry, magnitude, 0x00800080;
shr.u32 carry, carry, 1;
lop3.b32 $1, carry, 0x20002000, $1, 0xEA;
}""")


@triton.jit
def attend_tile(
    tile, low, high, first_key, stop_key, batch, sequence, group, token, queries, k, v, origin,
    block_tables, k_scale, v_scale, drafts, multiplier, maximum, total, acc,
    problem: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    MASKED: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """Updates the online softmax with the keys of one tile; without MASKED every token sees all of them.

    Tiles are counted from the key `origin`. Of the keys low ≤ j < high a token sees first_key ≤ j < stop_key, and with
    DRAFTS those that its bits say, of which `origin` is the first.
    """
    k_strides: tl.constexpr = problem.k
    v_strides: tl.constexpr = problem.v
    k_scale_strides: tl.constexpr = problem.k_scale
    v_scale_strides: tl.constexpr = problem.v_scale
    position = origin + tile * BLOCK_K + tl.arange(0, BLOCK_K)
    # A slot that is not visible is not read: the nearest visible one is read instead.
    clamped_position = tl.minimum(tl.maximum(position, low), high - 1) if MASKED else position
    page, slot = page_and_slot(block_tables, batch, sequence, tile, clamped_position, problem, BLOCK_K, DRAFTS)
    row_of_k, row_of_v = row_at(k_strides, batch, page, slot, group), row_at(v_strides, batch, page, slot, group)
    if PAIRS:
        first, second = load_pairs(k, row_of_k, 0, problem.D, None, problem)
        s = tl.dot(queries[1], tl.trans(second), tl.dot(queries[0], tl.trans(first))) * multiplier[:, None]
    else:
        keys = in_dtype(load_rows(k, row_of_k, 0, problem.D, WIDTH, None), queries)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee") * multiplier
    factor = scales_at(k_scale, k_scale_strides, batch, page, slot, group, None)
    if factor is not None:
        s *= factor[None, :]
    if problem.softcap is not None:
        s = problem.softcap * LOG2E * tanh(s)
    is_visible = None
    if MASKED:
        visible_to = (clamped_position == position)[None, :]
        if problem.causal and problem.draft_words == 0:
            visible_to = visible_to & (position[None, :] < stop_key[:, None])
        if problem.left is not None:
            visible_to = visible_to & (position[None, :] >= first_key[:, None])
        if DRAFTS:
            asked = (token >= 0) & (token < problem.T)
            row = batch * problem.T + token
            visible_to = visible_to & is_drafted(drafts, row, asked, tile, problem.draft_words, BLOCK_K)
            # A draft that no token of the row sees has no weight, and its value, which 0 may not be a factor of, is 0.
            is_visible = tl.max(visible_to.to(tl.int32), 0) != 0
        s = tl.where(visible_to, s, float("-inf"))
    highest = tl.maximum(maximum, tl.max(s, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    p = tl.exp2(s - base[:, None])
    alpha = tl.exp2(maximum - base)
    total = total * alpha + tl.sum(p, 1)
    factor = scales_at(v_scale, v_scale_strides, batch, page, slot, group, is_visible)
    if factor is not None:
        p *= factor[None, :]
    if PAIRS:
        first, second = load_pairs(v, row_of_v, problem.v_offset, problem.V, is_visible, problem)
        if factor is None:
            p = p.to(tl.float16)
            acc = tl.dot(p, first, acc[0] * alpha[:, None]), tl.dot(p, second, acc[1] * alpha[:, None])
        else:
            unit, per_unit = power_of_two(tl.max(tl.abs(p), 1))
            p = (p * per_unit[:, None]).to(tl.float16)
            even = acc[0] * alpha[:, None] + tl.dot(p, first) * unit[:, None]
            acc = even, acc[1] * alpha[:, None] + tl.dot(p, second) * unit[:, None]
    else:
        values = in_dtype(load_rows(v, row_of_v, problem.v_offset, problem.V, V_WIDTH, is_visible), queries)
        if factor is None or values.dtype != tl.float16:
            acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision="ieee")
        else:  # out of whose range a factor may take p
            unit, per_unit = power_of_two(tl.max(tl.abs(p), 1))
            acc = acc * alpha[:, None] + tl.dot((p * per_unit[:, None]).to(tl.float16), values) * unit[:, None]
    return highest, total, acc


@triton.jit
def load_rows(x, row, offset: tl.constexpr, features: tl.constexpr, WIDTH: tl.constexpr, is_visible):
    """A tile of keys or values, whose rows are 0 where they are not visible; None stands for all of them."""
    column = tl.arange(0, WIDTH)
    at = x + row[:, None] * features + column[None, :] + offset
    if features == WIDTH and is_visible is None:
        return tl.load(at)
    elif features == WIDTH:
        return tl.load(at, mask=is_visible[:, None], other=0.0)
    elif is_visible is None:
        return tl.load(at, mask=(column < features)[None, :], other=0.0)
    else:
        return tl.load(at, mask=is_visible[:, None] & (column < features)[None, :], other=0.0)


@triton.jit
def load_pairs(x, row, offset: tl.constexpr, features: tl.constexpr, is_visible, problem: tl.constexpr):
    """The features of a tile of eight-bit keys or values, as `load_rows` reads it, in float16: the first of each pair,
    and the second.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, features // 2)
    at = row[:, None] * (features // 2) + column[None, :] + offset // 2
    at = x.to(tl.pointer_type(tl.int16), bitcast=True) + at
    pairs = tl.load(at) if is_visible is None else tl.load(at, mask=is_visible[:, None], other=0)
    if problem.ptx:
        return float16_by_ptx(pairs, dtype)
    elif dtype == tl.uint8:
        first = ((pairs & 0x80) << 8) | ((pairs & 0x7F) << 7)
        return float16_of_e4m3(first), float16_of_e4m3((pairs & -0x8000) | ((pairs >> 1) & 0x3F80))
    elif dtype == tl.int8:
        # 1024 + 128 + x in float16, whose last bit is 1 there.
        first = ((pairs & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
        return first, (((pairs >> 8) & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
    else:
        first = pairs.to(tl.int8).to(dtype, bitcast=True).to(tl.float16)
        return first, (pairs >> 8).to(tl.int8).to(dtype, bitcast=True).to(tl.float16)


@triton.jit
def float16_of_e4m3(bits):
    """e4m3 in float16, of its sign, and its exponent and mantissa at the places of float16's, whose bias is 8 more."""
    magnitude: tl.constexpr = 0x3F80
    return tl.where((bits & magnitude) == magnitude, float("nan"), bits.to(tl.float16, bitcast=True) * 256.0)


@triton.jit
def float16_by_ptx(pairs, dtype: tl.constexpr):
    """The lower and the upper bytes of words of sixteen bits, two words in an instruction: LLVM takes each byte of a
    register out by itself, 1194 instructions beside 882 for 128 int8 keys, and 1121 beside 700 for e4m3.
    """
    if dtype == tl.int8:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 odd;
            lop3.b32 $0, $2, 0x00FF00FF, 0x64806480, 0x6A;
            prmt.b32 odd, $2, 0x64, 0x4341;
            xor.b32 $1, odd, 0x00800080;
            sub.f16x2 $0, $0, $3;
            sub.f16x2 $1, $1, $3;
            }""",
            "=&r,=&r,r,r",
            [pairs, tl.full(pairs.shape, 1152.0, tl.float16)],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif dtype == tl.uint8:
        return tl.inline_asm_elementwise(
            E4M3_IN_PTX, "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            .reg .b16 even, odd;
            prmt.b32 both, $2, 0, 0x3120;
            mov.b32 {even, odd}, both;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd;
            }""",
            "=&r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def power_of_two(x):
    """The greatest power of two that is at most x, in float32's normal range, and its reciprocal."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7E800000)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def page_and_slot(
    block_tables, batch, sequence, tile, position,
    problem: tl.constexpr, BLOCK_K: tl.constexpr, DRAFTS: tl.constexpr = False,
):  # fmt: skip
    """The page and slot of the keys of a tile, which with DRAFTS begins anywhere; pages are clamped to the pool."""
    if block_tables is None:
        return sequence, position
    else:
        table = block_tables + (batch * problem.N + sequence).to(tl.int64) * problem.columns
        if problem.page % BLOCK_K == 0 and not DRAFTS:
            page = tl.load(table + tl.minimum(tile // (problem.page // BLOCK_K), problem.columns - 1))
        else:
            page = tl.load(table + position // problem.page)
        page = tl.minimum(tl.maximum(page, 0), problem.pages - 1)
        return page, position % problem.page


@triton.jit
def row_at(strides: tl.constexpr, batch, page, slot, group):
    """The row index of (batch, page, slot, group) in an array with these axes."""
    of_page = tl.cast(page, tl.int64) * strides.page + batch.to(tl.int64) * strides.batch + group * strides.group
    return of_page + slot * strides.slot


@triton.jit
def scales_at(scales, strides: tl.constexpr, batch, page, slot, group, is_visible):
    """The scales of a tile of keys or values, 0 where they are not visible; None if they do not vary over slots."""
    if scales is None or (strides.page == 0 and strides.slot == 0):
        return
    elif is_visible is None:
        return tl.load(scales + row_at(strides, batch, page, slot, group))
    else:
        return tl.load(scales + row_at(strides, batch, page, slot, group), mask=is_visible, other=0.0)


@triton.jit
def in_dtype(x, queries):
    """Keys or values as they are multiplied: eight bits in the dtype of the queries, which holds all of these.

    uint8 stands for e4m3, of GPUs that do not convert it.
    """
    if x.dtype == queries.dtype:
        return x
    elif x.dtype == tl.uint8:
        bits = x.to(tl.int16)
        return float16_of_e4m3(((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(queries.dtype)
    elif x.dtype == tl.int8:
        return x.to(tl.float32).to(queries.dtype)
    else:
        return x.to(queries.dtype)


@triton.jit
def tanh(x):
    """(1 − e) / (1 + e) with e = exp(−2|x|) and the sign of x; by its series where 1 − e has few bits."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    y = (1 - e) / (1 + e)
    z = x * x
    series = x + x * z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835))))
    return tl.where(z < 0.0625, series, tl.where(x < 0, -y, y))
