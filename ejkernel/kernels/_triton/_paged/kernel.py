"""Attention of rows of tokens over a cache in pages, split over the keys (Flash-Decoding) or not.

A program has the tokens of a row, of all heads that share a key/value head, and the keys that they see, or a split of
these. It reads each key and value once:

    s_j = softcap·tanh(scale·q·k_j / softcap)
    lse = log(Σ_j exp s_j + Σ_x exp sinks_x),    o = Σ_j exp(s_j − lse) v_j

A split stores o and lse without the sinks. The program of a row and key/value head that finishes last, found by a
counter, merges the splits in their order; if there are many, `merge.py` does. Slots that no token of the row sees are
not read; those that some tokens do not see are masked for these.
"""

import triton
import triton.language as tl

from .attend import attend_tile, power_of_two, row_at
from .drafts import visible_tiles
from .softmax import LOG2E, merged, softmax_before, write, write_padding
from .work import cached_keys, item_of_plan, keys_of_row, keys_of_tokens, row_of_program, split_of_keys


@triton.jit
def attend_kernel(
    q, k, v, context_lens, starts, num_seqs, first_keys, block_tables, sinks, k_scale, v_scale, drafts, plan,
    tiled_keys, causal_drafts, o, lse, o_splits, lse_splits, arrivals,
    problem: tl.constexpr, schedule: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_DRAFTS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) % problem.G
    unit = tl.program_id(0) // problem.G
    if ROWS > 64:  # of a prefill the last tokens, which see most, come first
        unit = tl.num_programs(0) // problem.G - 1 - unit
    batch, sequence, token, tokens, position, low, high, slot, split, splits = work_of_program(
        unit, context_lens, starts, num_seqs, first_keys, plan, tiled_keys, problem, schedule, BLOCK_K
    )
    heads: tl.constexpr = problem.H // problem.G
    row = tl.arange(0, ROWS)
    of_token = row // heads
    if tokens == 0:
        if schedule.padding and o is not None:
            write_padding(o, lse, batch, token + of_token, of_token, group * heads + row % heads, starts, num_seqs,
                          problem, schedule, V_WIDTH)  # fmt: skip
        return
    if problem.only_drafts:
        cached = cached_keys(batch, sequence, context_lens, starts, problem)
        low = tl.maximum(low, cached + tl.load(causal_drafts + batch * problem.N + sequence))
        if low >= high:
            return
    in_row = of_token < tokens
    d, e = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
    # [batch, token, head] of a row of the tile.
    at = ((batch * problem.T + token + of_token) * problem.H + group * heads + row % heads).to(tl.int64)
    in_step = in_row & (token + of_token >= 0) & (token + of_token < problem.T)
    queries, multiplier = load_queries(q, k_scale, at, in_step, d, batch, group, problem, PAIRS)
    place = position + of_token
    # Of the rows of a tile that are those of no token, or of one in no context, none sees a draft.
    sees = tl.where(in_row & (place >= 0), token + of_token, -1)
    maximum, total, acc = softmax_before(o, lse, at, in_step, e, problem, ROWS, V_WIDTH, PAIRS)
    maximum, total, acc = attend_keys(
        low, high, position, place, batch, sequence, group, sees, queries, k, v, context_lens, starts,
        first_keys, block_tables, k_scale, v_scale, drafts, multiplier, maximum, total, acc,
        problem, ROWS, BLOCK_K, WIDTH, V_WIDTH, PAIRS, BLOCK_DRAFTS, ALIGNED=plan is None and first_keys is None,
    )  # fmt: skip
    head = group * heads + row % heads
    whole: tl.constexpr = plan is None and schedule.splits == 1
    # `splits` is known at run time alone, even where a launch has a fixed number of them. If another merges them, there
    # is no o.
    if o is not None:  # noqa: SIM102, since the inner condition may be known at run time alone
        if whole or splits == 1:
            write(o, lse, at, in_step, maximum, total, acc, place, sinks, batch, head, problem, V_WIDTH)
    if not whole:  # noqa: SIM102, as above
        if splits > 1:
            store_split(o_splits, lse_splits, slot, of_token, head, e, in_row, maximum, total, acc, problem, schedule)
            if arrivals is not None:  # noqa: SIM102, as above
                if is_last(arrivals, slot, split, splits, group, problem):
                    out = ((slot.to(tl.int64) - split) * schedule.tokens + of_token) * problem.H + head
                    maximum, total, acc = merged(
                        o_splits, lse_splits, out, in_row, splits, problem, schedule, SPLITS, V_WIDTH
                    )
                    write(o, lse, at, in_step, maximum, total, acc, place, sinks, batch, head, problem, V_WIDTH)


@triton.jit
def work_of_program(
    unit, context_lens, starts, num_seqs, first_keys, plan, tiled_keys,
    problem: tl.constexpr, schedule: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A row as `row_of_program` gives it, its keys low ≤ j < high, and where which of how many splits is left."""
    if plan is None:
        split = unit % schedule.splits
        splits: tl.constexpr = schedule.splits
        slot = unit
        batch, sequence, token, tokens, position = row_of_program(
            unit // schedule.splits, context_lens, starts, num_seqs, tiled_keys, problem, schedule
        )
        low, high = keys_of_row(batch, sequence, position, tokens, context_lens, first_keys, problem)
        low, high = split_of_keys(low, high, split, BLOCK_K, schedule)
        return batch, sequence, token, tokens, position, low, high, slot, split, splits
    else:
        batch, sequence, token, tokens, position, begin, end, slot, split, splits = item_of_plan(
            unit, plan, context_lens, starts, problem, schedule
        )
        low, high = keys_of_row(batch, sequence, position, tokens, context_lens, first_keys, problem)
        low, high = tl.maximum(low, begin), tl.minimum(high, end)
        slot += batch * (2 * schedule.items)
        return batch, sequence, token, tokens, position, low, high, slot, split, splits


@triton.jit
def load_queries(q, k_scale, at, in_step, d, batch, group, problem: tl.constexpr, PAIRS: tl.constexpr):
    """The queries of a row, as a pair where keys are read in pairs of features, and what q·k is multiplied by."""
    factor: tl.constexpr = problem.scale * LOG2E if problem.softcap is None else problem.scale / problem.softcap
    multiplier = tl.full([], factor, tl.float32)  # a number that is none of its normal ones would be a float64
    if PAIRS:
        first = q + at[:, None] * problem.D + 2 * tl.arange(0, d.shape[0] // 2)[None, :]
        even = tl.load(first, mask=in_step[:, None], other=0.0).to(tl.float32)
        odd = tl.load(first + 1, mask=in_step[:, None], other=0.0).to(tl.float32)
        unit, per_unit = power_of_two(tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1)))
        queries = (even * per_unit[:, None]).to(tl.float16), (odd * per_unit[:, None]).to(tl.float16)
        multiplier *= unit
    else:
        queries = tl.load(
            q + at[:, None] * problem.D + d[None, :], mask=in_step[:, None] & (d < problem.D)[None, :], other=0.0
        )
    strides: tl.constexpr = problem.k_scale
    if k_scale is not None:  # noqa: SIM102, since strides are None without
        if strides.page == 0 and strides.slot == 0:
            multiplier *= tl.load(k_scale + row_at(strides, batch, 0, 0, group))
    return queries, multiplier


@triton.jit
def attend_keys(
    low, high, position, place, batch, sequence, group, token, queries, k, v, context_lens, starts,
    first_keys, block_tables, k_scale, v_scale, drafts, multiplier, maximum, total, acc,
    problem: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_DRAFTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The softmax of a row, continued over its keys low ≤ j < high; ALIGNED: whether a tile begins at low."""
    first_key, stop_key = keys_of_tokens(place, high, problem)
    stop = high
    if problem.draft_words:
        cached = cached_keys(batch, sequence, context_lens, starts, problem)
        stop = tl.minimum(tl.maximum(cached, low), high)
    if not problem.only_drafts:
        begin = low // BLOCK_K
        end = tl.where(low < stop, tl.cdiv(stop, BLOCK_K), begin)
        # All slots of a dense cache, which are whole tiles.
        every: tl.constexpr = context_lens is None and first_keys is None and problem.left is None
        masked: tl.constexpr = not (every and not problem.causal and problem.page % BLOCK_K == 0)
        if ROWS > 64 and problem.left is None and ALIGNED:
            # Tiles before the first token's own key need no causal mask.
            full = tl.maximum(tl.minimum(stop, position + 1) // BLOCK_K, begin)
            if not problem.causal:
                full = tl.maximum(stop // BLOCK_K, begin)
            for tile in tl.range(begin, full):
                maximum, total, acc = attend_tile(
                    tile, low, stop, first_key, stop_key, batch, sequence, group, token, queries, k, v, 0,
                    block_tables, k_scale, v_scale, drafts, multiplier, maximum, total, acc,
                    problem, BLOCK_K, WIDTH, V_WIDTH, PAIRS, MASKED=False, DRAFTS=False,
                )  # fmt: skip
            begin = full
        for tile in tl.range(begin, end):
            maximum, total, acc = attend_tile(
                tile, low, stop, first_key, stop_key, batch, sequence, group, token, queries, k, v, 0,
                block_tables, k_scale, v_scale, drafts, multiplier, maximum, total, acc,
                problem, BLOCK_K, WIDTH, V_WIDTH, PAIRS, MASKED=masked, DRAFTS=False,
            )  # fmt: skip
    if problem.draft_words:
        begin = (stop - cached) // BLOCK_DRAFTS
        end = tl.where(stop < high, tl.cdiv(high - cached, BLOCK_DRAFTS), begin)
        if ROWS > 64:  # tokens of a prefill see no draft behind their own
            asked, row = (token >= 0) & (token < problem.T), batch * problem.T + token
            end = tl.minimum(end, visible_tiles(drafts, row, asked, problem.draft_words, BLOCK_DRAFTS))
        for tile in tl.range(begin, end):
            maximum, total, acc = attend_tile(
                tile, stop, high, first_key, stop_key, batch, sequence, group, token, queries, k, v, cached,
                block_tables, k_scale, v_scale, drafts, multiplier, maximum, total, acc,
                problem, BLOCK_DRAFTS, WIDTH, V_WIDTH, PAIRS, MASKED=True, DRAFTS=True,
            )  # fmt: skip
    if PAIRS:
        acc = tl.reshape(tl.join(acc[0], acc[1]), [ROWS, V_WIDTH])
    strides: tl.constexpr = problem.v_scale
    if v_scale is not None:  # noqa: SIM102, since strides are None without
        if strides.page == 0 and strides.slot == 0:
            acc *= tl.load(v_scale + row_at(strides, batch, 0, 0, group))
    return maximum, total, acc


@triton.jit
def store_split(
    o_splits, lse_splits, slot, of_token, head, e, in_row, maximum, total, acc,
    problem: tl.constexpr, schedule: tl.constexpr,
):  # fmt: skip
    """o and lse of one split, without the sinks."""
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    out = (slot.to(tl.int64) * schedule.tokens + of_token) * problem.H + head
    tl.store(o_splits + out[:, None] * problem.V + e[None, :], acc, mask=in_row[:, None] & (e < problem.V)[None, :])
    tl.store(lse_splits + out, maximum + tl.log2(total), mask=in_row)


@triton.jit
def is_last(arrivals, slot, split, splits, group, problem: tl.constexpr):
    """Increments the counter after this split was stored; whether all other splits had been stored before."""
    first = slot.to(tl.int64) - split
    # All threads have stored before one of them releases the counter, and load only after it was acquired.
    tl.debug_barrier()
    return tl.atomic_add(arrivals + first * problem.G + group, 1, sem="acq_rel", scope="gpu") == splits - 1
