"""The table of work tiles, in one launch: a program finds the place of its sequence in the order, and writes its tiles.

By XLA that is seven launches, about 10 µs in front of every step.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from .work import count_of_sequences

# Sequences that a program compares its own with at once, and tiles that it writes at once.
MOST_AT_ONCE, TILES_AT_ONCE = 1024, 128
_BEFORE_ALL = tl.constexpr(-(2**31))


@dataclass(frozen=True)
class TileSchedule:
    """How the tokens of a step are divided into work tiles.

    Attributes:
        B, N, T: batches, and sequences and tokens of each.
        block_q: tokens of a tile at most.
        least: sequences of fewer tokens, the decodes, have no tiles.
        left: how many keys before its own a token sees; None for all.
        keys: slots of a sequence.
        most_tiles: places of the table.
        most_keys, least_decodes: decodes of up to so many keys have tiles too, beside prefills and if there are so many
            of them; 0 for none.
    """

    B: int
    N: int
    T: int
    block_q: int
    least: int
    left: int | None
    keys: int
    most_tiles: int
    most_keys: int = 0
    least_decodes: int = 0


@triton.jit
def work_tiles_kernel(
    context_lens, starts, num_seqs, of_step,
    table, total, tiled_keys,
    schedule: tl.constexpr, SEQUENCES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The program behind those of all sequences has none, and as many tiles before it as there are."""
    index, every = tl.program_id(0), schedule.B * (schedule.N + 2)
    most_keys = None
    if tiled_keys is not None:
        most_keys = keys_of_decodes(context_lens, starts, num_seqs, schedule, SEQUENCES)
    sequence, start, length, context, is_decode = sequence_of(
        index, context_lens, starts, num_seqs, most_keys, schedule
    )
    before = 0
    for first in tl.range(0, every, SEQUENCES):
        other = first + tl.arange(0, SEQUENCES)
        _, _, of_length, of_context, decodes = sequence_of(other, context_lens, starts, num_seqs, most_keys, schedule)
        earlier = (of_context > context) | ((of_context == context) & (other < index))
        if tiled_keys is not None:
            is_prefill, behind_prefills = decodes == 0, (index == every) | (is_decode > 0)
            earlier = tl.where(behind_prefills, is_prefill | earlier, is_prefill & earlier)
        before += tl.sum(tl.where(earlier, tl.cdiv(of_length, schedule.block_q), 0))
    if index == every:
        tl.store(total, tl.minimum(before, schedule.most_tiles))
        if tiled_keys is not None:
            tl.store(tiled_keys, most_keys)
    tiles, position = tl.cdiv(length, schedule.block_q), context - length
    first_key, stop = keys_of_sequence(position, context, sequence, of_step, schedule)
    for first in tl.range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        offset = (tiles - 1 - tile) * schedule.block_q  # the last tokens first
        place = before + tile
        there = (tile < tiles) & (place < schedule.most_tiles)
        entry = table + place * 6
        tl.store(entry, start + offset, mask=there)
        tl.store(entry + 1, tl.minimum(length - offset, schedule.block_q), mask=there)
        tl.store(entry + 2, position + offset, mask=there)
        tl.store(entry + 3, sequence, mask=there)
        tl.store(entry + 4, first_key, mask=there)
        tl.store(entry + 5, stop, mask=there)


@triton.jit
def keys_of_decodes(context_lens, starts, num_seqs, schedule: tl.constexpr, SEQUENCES: tl.constexpr):
    """Decodes of up to so many keys have tiles, beside prefills; less than there can be if none do."""
    decodes, prefills = 0, 0
    for first in tl.range(0, schedule.B * (schedule.N + 2), SEQUENCES):
        index = first + tl.arange(0, SEQUENCES)
        _, _, length, context, is_decode = sequence_of(
            index, context_lens, starts, num_seqs, schedule.most_keys, schedule
        )
        decodes += tl.sum(is_decode)
        prefills += tl.sum(((length > 0) & (context > 0) & (is_decode == 0)).to(tl.int32))
    has_tiles = (prefills > 0) & (decodes > 0) & (decodes >= schedule.least_decodes)
    return tl.where(has_tiles, schedule.most_keys, _BEFORE_ALL)


@triton.jit
def sequence_of(index, context_lens, starts, num_seqs, most_keys, schedule: tl.constexpr):
    """Sequence, first token, tokens (0 without tiles), context, and whether it is a decode with tiles, of an index,
    counted over all batches.

    The last two of a batch are its tokens before all sequences and after them; what is behind those of the last batch
    has no tokens and is last in the order.
    """
    N: tl.constexpr = schedule.N
    T: tl.constexpr = schedule.T
    batch = tl.minimum(index // (N + 2), schedule.B - 1)
    n = index - batch * (N + 2)
    count = count_of_sequences(num_seqs, batch, schedule)
    of_batch = starts + batch * (N + 1)
    start = tl.load(of_batch + tl.where(n > N, count, n), mask=n != N, other=0)
    end = tl.load(of_batch + tl.where(n == N, 0, n + 1), mask=n <= N, other=T)
    start, end = tl.minimum(tl.maximum(start, 0), T), tl.minimum(tl.maximum(end, 0), T)
    length = end - start
    has_tiles = ((n < count) & (length >= schedule.least)) | (n == N) | (n == N + 1)
    tiled = tl.where(has_tiles, length, 0)
    context = tl.load(context_lens + batch * N + n, mask=n < N, other=tl.where(n > N + 1, _BEFORE_ALL, 0))
    is_decode = 0
    if most_keys is not None:
        is_decode = (n < count) & (length > 0) & (length < schedule.least) & (context <= most_keys)
        tiled = tl.where(is_decode, length, tiled)
        is_decode = is_decode.to(tl.int32)
    return tl.minimum(n, N - 1) + batch * N, start + batch * T, tiled, context, is_decode


@triton.jit
def keys_of_sequence(position, context, sequence, of_step, schedule: tl.constexpr):
    """The keys first ≤ j < stop that some token sees, from the position of the first: `interval` of _visibility.py."""
    first, stop = 0, tl.minimum(tl.maximum(context, 0), schedule.keys)
    if of_step is not None:
        stop = tl.minimum(stop, position + tl.load(of_step + sequence))
    if schedule.left is not None:
        first = tl.maximum(position - schedule.left, 0)
    some = first < stop
    return tl.where(some, first, 0), tl.where(some, stop, 0)
