"""Attention of rows of tokens over a cache quantised by TurboQuant, split over the keys (Flash-Decoding) or not.

A program has the tokens of a row, of all heads that share a key/value head, and the keys that they see, or a split of
these. Of a query it has Π·q and √(π/2e)·S·Π·q, and of a key the entries c of Π·k / ‖k‖ and the signs s:

    s_j = softcap·tanh(scale·‖k_j‖·(⟨Π·q, c_j⟩ + ‖r_j‖·⟨√(π/2e)·S·Π·q, s_j⟩) / softcap)
    lse = log(Σ_j exp s_j + Σ_x exp sinks_x),    Π·o = Σ_j exp(s_j − lse)·‖v_j‖·c_j

where a sum over signs is twice that over bits, less that of all rows of S. In 16 bits products are of float16: a row of
queries is scaled by a power of two, and so is one of weights. Slots that no token of the row sees are not read.
"""

import triton
import triton.language as tl

from ejkernel.kernels._triton._paged.attend import page_and_slot, power_of_two, row_at, tanh
from ejkernel.kernels._triton._paged.kernel import store_split
from ejkernel.kernels._triton._paged.softmax import LOG2E, write, write_padding
from ejkernel.kernels._triton._paged.work import keys_of_row, keys_of_tokens, row_of_program, split_of_keys

from .entries import UNIT_OF_BITS, bits_of, entries_of, load_codebook
from .slots import load_norms, load_tile


@triton.jit
def turboquant_kernel(
    q, key_indices, key_signs, key_norms, value_indices, value_norms, codebooks, context_lens,
    starts, num_seqs, block_tables, sinks,
    o, lse, o_splits, lse_splits,
    problem: tl.constexpr, schedule: tl.constexpr, format: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr, SIGNS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    KEYS: tl.constexpr = 0 if TRANSPOSED else 1  # the axis of a tile of logits that they are along
    group = tl.program_id(0) % problem.G
    unit = tl.program_id(0) // problem.G
    split = unit % schedule.splits
    batch, sequence, token, tokens, position = row_of_program(
        unit // schedule.splits, context_lens, starts, num_seqs, None, problem, schedule
    )
    heads: tl.constexpr = problem.H // problem.G
    row = tl.arange(0, ROWS)
    of_token, head = row // heads, group * heads + row % heads
    if tokens == 0:
        if schedule.padding and o is not None:
            write_padding(
                o, lse, batch, token + of_token, of_token, head, starts, num_seqs, problem, schedule, 4 * WORDS
            )
        return
    low, high = keys_of_row(batch, sequence, position, tokens, context_lens, None, problem)
    low, high = split_of_keys(low, high, split, BLOCK_K, schedule)
    in_row = of_token < tokens
    at = ((batch * problem.T + token + of_token) * problem.H + head).to(tl.int64)
    in_step = in_row & (token + of_token >= 0) & (token + of_token < problem.T)
    place = position + of_token
    maximum, total, acc = attend_keys(
        low, high, place, batch, sequence, group, at, in_step, q, key_indices, key_signs, key_norms, value_indices,
        value_norms, codebooks, block_tables,
        problem, format, ROWS, BLOCK_K, WORDS, SIGNS, KEYS,
    )  # fmt: skip
    if o is not None:
        write(o, lse, at, in_step, maximum, total, acc, place, sinks, batch, head, problem, 4 * WORDS)
    else:
        e = tl.arange(0, 4 * WORDS)
        store_split(o_splits, lse_splits, unit, of_token, head, e, in_row, maximum, total, acc, problem, schedule)


@triton.jit
def attend_keys(
    low, high, place, batch, sequence, group, at, in_step, q, key_indices, key_signs, key_norms, value_indices,
    value_norms, codebooks, block_tables,
    problem: tl.constexpr, format: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr,
    SIGNS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The softmax of a row over its keys low ≤ j < high, without the sinks, and Σ_j exp(s_j − maximum)·‖v_j‖·c_j."""
    strides: tl.constexpr = problem.k
    key_book = load_codebook(codebooks, batch, 0, format)
    value_book = load_codebook(codebooks, batch, 1, format)
    rotated, unit = load_rotated(q, at, in_step, format, WORDS, KEYS)
    projected, offset, sign_unit = load_projected(q, at, in_step, format, SIGNS, KEYS)
    unit *= key_book[0]
    zero = tl.zeros([ROWS, WORDS] if KEYS == 1 else [WORDS, ROWS], tl.float32)
    acc = zero, zero, zero, zero
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    first_key, stop_key = keys_of_tokens(place, high, problem)
    begin = low // BLOCK_K
    for tile in tl.range(begin, tl.where(low < high, tl.cdiv(high, BLOCK_K), begin)):
        position = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        # A slot that is not visible is not read: the nearest visible one is read instead.
        clamped = tl.minimum(tl.maximum(position, low), high - 1)
        page, slot = page_and_slot(block_tables, batch, sequence, tile, clamped, problem, BLOCK_K)
        slots = row_at(strides, batch, page, slot, group)
        norm, residual = load_norms(key_norms, slots)
        value_norm = tl.load(value_norms + slots).to(tl.float32)
        s = logits(slots, rotated, unit, projected, offset, sign_unit, key_indices, key_signs, norm, residual,
                   key_book, problem, format, WORDS, SIGNS, KEYS)  # fmt: skip
        at_key = tl.expand_dims(position, 1 - KEYS)
        visible = tl.expand_dims(clamped == position, 1 - KEYS) & (at_key < tl.expand_dims(stop_key, KEYS))
        if problem.left is not None:
            visible = visible & (at_key >= tl.expand_dims(first_key, KEYS))
        s = tl.where(visible, s, float("-inf"))
        highest = tl.maximum(maximum, tl.max(s, KEYS))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2(s - tl.expand_dims(base, KEYS))
        alpha = tl.exp2(maximum - base)
        total = total * alpha + tl.sum(p, KEYS)
        maximum = highest
        # Of a key that a token does not see not even the norm counts, which may be NaN.
        p = tl.where(p > 0.0, p * tl.expand_dims(value_norm, 1 - KEYS), 0.0)
        acc = with_values(acc, alpha, p, slots, value_indices, value_book, format, WORDS, KEYS)
    acc = tl.join(tl.join(acc[0], acc[2]), tl.join(acc[1], acc[3]))
    if KEYS == 0:
        acc = tl.permute(acc, (1, 0, 2, 3))
    return maximum, total, tl.reshape(acc, [ROWS, 4 * WORDS]) * value_book[0]


@triton.jit
def logits(
    slots, rotated, unit, projected, offset, sign_unit, key_indices, key_signs, norm, residual, book,
    problem: tl.constexpr, format: tl.constexpr, WORDS: tl.constexpr, SIGNS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Those of a tile of keys in these slots, of base 2."""
    words = load_tile(key_indices.to(tl.pointer_type(tl.int16), bitcast=True), slots, format.words, WORDS, 1 - KEYS)
    c = entries_of(words, book, format, format.key_entries)
    s = of_queries(rotated[0], c[0], None, format, KEYS)
    for j in tl.static_range(1, 4):
        s = of_queries(rotated[j], c[j], s, format, KEYS)
    bits = bits_of(load_tile(key_signs, slots, format.signs, SIGNS, 1 - KEYS), format)
    of_signs = of_queries(projected[0], bits[0], None, format, KEYS)
    for j in tl.static_range(1, 8):
        of_signs = of_queries(projected[j], bits[j], of_signs, format, KEYS)
    of_signs = of_signs * tl.expand_dims(sign_unit, KEYS) - tl.expand_dims(offset, KEYS)
    s = s * tl.expand_dims(unit, KEYS) + of_signs * tl.expand_dims(residual, 1 - KEYS)
    if problem.softcap is None:
        return s * tl.expand_dims(norm * (problem.scale * LOG2E), 1 - KEYS)
    else:
        return problem.softcap * LOG2E * tanh(s * tl.expand_dims(norm * (problem.scale / problem.softcap), 1 - KEYS))


@triton.jit
def of_queries(queries, keys, s, format: tl.constexpr, KEYS: tl.constexpr):
    """The products of queries and keys, which are added to s."""
    if KEYS == 0:
        return tl.dot(keys, queries, s, input_precision=format.precision)
    else:
        return tl.dot(queries, keys, s, input_precision=format.precision)


@triton.jit
def with_values(
    acc, alpha, p, slots, value_indices, book, format: tl.constexpr, WORDS: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """The four tiles of acc, times alpha, plus p times the entries of the values in these slots."""
    words = load_tile(value_indices.to(tl.pointer_type(tl.int16), bitcast=True), slots, format.words, WORDS, KEYS)
    c = entries_of(words, book, format, format.value_entries)
    alpha = tl.expand_dims(alpha, KEYS)
    if format.dtype == tl.float16:
        unit, per_unit = power_of_two(tl.max(tl.abs(p), KEYS))
        p = (p * tl.expand_dims(per_unit, KEYS)).to(tl.float16)
        unit = tl.expand_dims(unit, KEYS)
    else:
        unit = 1.0
    return (
        acc[0] * alpha + of_weights(p, c[0], format, KEYS) * unit,
        acc[1] * alpha + of_weights(p, c[1], format, KEYS) * unit,
        acc[2] * alpha + of_weights(p, c[2], format, KEYS) * unit,
        acc[3] * alpha + of_weights(p, c[3], format, KEYS) * unit,
    )


@triton.jit
def of_weights(p, values, format: tl.constexpr, KEYS: tl.constexpr):
    """The sums of values by their weights."""
    if KEYS == 0:
        return tl.dot(values, p, input_precision=format.precision)
    else:
        return tl.dot(p, values, input_precision=format.precision)


@triton.jit
def load_rotated(q, at, in_step, format: tl.constexpr, WORDS: tl.constexpr, KEYS: tl.constexpr):
    """Π·q of a row: of every word its features j in tile j, in the dtype of a product, and their unit [ROWS]."""
    column = tl.arange(0, WORDS)
    width: tl.constexpr = 4 * format.words + 8 * format.signs
    first = q + tl.expand_dims(at, KEYS) * width + 4 * tl.expand_dims(column, 1 - KEYS)
    inside = tl.expand_dims(in_step, KEYS) & tl.expand_dims(column < format.words, 1 - KEYS)
    magnitude = tl.zeros(inside.shape, tl.float32)
    for j in tl.static_range(4):
        magnitude = tl.maximum(magnitude, tl.abs(tl.load(first + j, mask=inside, other=0.0)))
    unit, per_unit = unit_of(magnitude, format, KEYS)
    parts = ()
    for j in tl.static_range(4):
        part = tl.load(first + j, mask=inside, other=0.0) * tl.expand_dims(per_unit, KEYS)
        parts += (part.to(format.dtype),)
    return parts, unit


@triton.jit
def load_projected(q, at, in_step, format: tl.constexpr, SIGNS: tl.constexpr, KEYS: tl.constexpr):
    """√(π/2e)·S·Π·q of a row: of every byte its rows j in tile j, the sum of all, and the unit of a sum over bits."""
    column = tl.arange(0, SIGNS)
    width: tl.constexpr = 4 * format.words + 8 * format.signs
    first = q + tl.expand_dims(at, KEYS) * width + 4 * format.words + 8 * tl.expand_dims(column, 1 - KEYS)
    inside = tl.expand_dims(in_step, KEYS) & tl.expand_dims(column < format.signs, 1 - KEYS)
    magnitude = tl.zeros(inside.shape, tl.float32)
    for j in tl.static_range(8):
        magnitude = tl.maximum(magnitude, tl.abs(tl.load(first + j, mask=inside, other=0.0)))
    unit, per_unit = unit_of(magnitude, format, KEYS)
    sums = tl.zeros(inside.shape, tl.float32)
    parts = ()
    for j in tl.static_range(8):
        part = tl.load(first + j, mask=inside, other=0.0) * tl.expand_dims(per_unit, KEYS)
        part = part.to(format.dtype)
        sums += part.to(tl.float32)
        parts += (of_bit(part, j, format),)
    factor: tl.constexpr = 2.0 / UNIT_OF_BITS if format.ptx else 2.0
    return parts, tl.sum(sums, KEYS) * unit, unit * factor


@triton.jit
def of_bit(part, j: tl.constexpr, format: tl.constexpr):
    """What a product has beside bit j of a byte, which is 2^j units by PTX."""
    if format.ptx:
        return part * tl.full([], 2.0**-j, tl.float16)
    else:
        return part


@triton.jit
def unit_of(magnitude, format: tl.constexpr, KEYS: tl.constexpr):
    """The power of two that a row of these magnitudes is scaled by, so that it fits float16, and its reciprocal."""
    largest = tl.max(magnitude, KEYS)
    if format.dtype == tl.float16:
        return power_of_two(largest)
    else:
        one = tl.full(largest.shape, 1.0, tl.float32)
        return one, one
