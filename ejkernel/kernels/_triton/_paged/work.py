"""What a program of the kernels over a cache computes: which tokens, and which of their keys."""

import triton
import triton.language as tl


@triton.jit
def row_of_program(
    unit, context_lens, starts, num_seqs, tiled_keys, problem: tl.constexpr, schedule: tl.constexpr
):  # fmt: skip
    """The row of a program: batch, sequence, first token in the step, tokens (0 is no work), and its first position.

    `unit` counts the rows of all batches. Where rows are packed, each sequence has one, and the others that have more
    tokens follow; those behind the last one that has tokens stand for the tokens of no sequence, and the first token is
    that of these. Otherwise sequences of up to `tiled_keys` keys, if given, are none of the launch.
    """
    batch = unit // schedule.rows
    row = unit % schedule.rows
    if starts is None:
        length: tl.constexpr = problem.length
        position = context_of(context_lens, batch, row, problem) - length
        return batch, row, row * length, length, position
    else:
        if not schedule.packed or row < problem.N:
            sequence, length, before, token = first_row(row, starts, num_seqs, batch, problem, schedule)
        else:
            sequence, length, before, token = later_row(row - problem.N, starts, num_seqs, batch, problem, schedule)
        context = context_of(context_lens, batch, sequence, problem)
        if tiled_keys is not None:
            length = tl.where(context > tl.load(tiled_keys), length, 0)
        return batch, sequence, token, tl.minimum(length - before, schedule.tokens), context - length + before


@triton.jit
def first_row(sequence, starts, num_seqs, batch, problem: tl.constexpr, schedule: tl.constexpr):
    """Of the first row of a sequence: the sequence, its tokens, those before the row, and the row's first token.

    A sequence that is not computed has no tokens, and its first is behind all. There is no search, for which the
    programs of a decode would wait before they load their keys.
    """
    of_sequence = starts + batch * (problem.N + 1) + sequence
    start = tl.load(of_sequence)
    length = tl.load(of_sequence + 1) - start
    is_row = (length >= schedule.least) & (length <= schedule.most)
    is_row &= sequence < count_of_sequences(num_seqs, batch, problem)
    return sequence, tl.where(is_row, length, 0), 0, tl.where(is_row, start, problem.T)


@triton.jit
def later_row(row, starts, num_seqs, batch, problem: tl.constexpr, schedule: tl.constexpr):
    """The same of a row behind the first ones of all sequences, which may also stand for tokens of no sequence."""
    of_batch = starts + batch * (problem.N + 1)
    count = count_of_sequences(num_seqs, batch, problem)
    n = tl.arange(0, triton.next_power_of_2(problem.N))
    lengths = tl.load(of_batch + n + 1, mask=n < count, other=0) - tl.load(of_batch + n, mask=n < count, other=0)
    lengths = tl.where((lengths >= schedule.least) & (lengths <= schedule.most), lengths, 0)
    ends = tl.cumsum(tl.maximum(tl.cdiv(lengths, schedule.tokens) - 1, 0), 0)
    rows = tl.max(ends, 0)
    is_row = row < rows
    sequence = tl.where(is_row, tl.sum((ends <= row).to(tl.int32)), 0)
    length = tl.where(is_row, tl.sum(tl.where(n == sequence, lengths, 0)), 0)
    end = tl.sum(tl.where(n == sequence, ends, 0))
    before = tl.where(is_row, (row - end + tl.cdiv(length, schedule.tokens)) * schedule.tokens, 0)
    token = tl.where(is_row, tl.load(of_batch + sequence) + before, (row - rows) * schedule.tokens)
    return sequence, length, before, token


@triton.jit
def count_of_sequences(num_seqs, batch, problem: tl.constexpr):
    """The number of sequences of the step, at most N."""
    return tl.minimum(tl.maximum(tl.load(num_seqs + batch), 0), problem.N)


@triton.jit
def tokens_of_sequences(starts, num_seqs, batch, problem: tl.constexpr):
    """The tokens first ≤ t < last of the step are those of its sequences."""
    of_batch = starts + batch * (problem.N + 1)
    first = tl.minimum(tl.maximum(tl.load(of_batch), 0), problem.T)
    last = tl.load(of_batch + count_of_sequences(num_seqs, batch, problem))
    return first, tl.minimum(tl.maximum(last, first), problem.T)


@triton.jit
def context_of(context_lens, batch, sequence, problem: tl.constexpr):
    """The number of keys of a sequence: context_lens, or all slots of its page if there is none."""
    if context_lens is None:
        return tl.full([], problem.page, tl.int32)
    else:
        return tl.load(context_lens + batch * problem.N + sequence)


@triton.jit
def item_of_plan(item, plan, context_lens, starts, problem: tl.constexpr, schedule: tl.constexpr):
    """A row as `row_of_program` gives it, and first key, stop, slot and number of splits of its work item."""
    batch = item // schedule.items
    entry = plan + (batch * schedule.plan_batch + item % schedule.items).to(tl.int64) * 8
    sequence, token, tokens = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    page, pages = tl.load(entry + 3), tl.load(entry + 4)
    slot, split, splits = tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 7)
    sequence = tl.minimum(tl.maximum(sequence, 0), problem.N - 1)
    # Results of splits are stored within their arrays, whatever a plan says.
    slot = tl.minimum(tl.maximum(slot, 0), 2 * schedule.items - 1)
    split = tl.minimum(tl.maximum(split, 0), slot)
    splits = tl.minimum(splits, 2 * schedule.items - slot + split)
    if starts is None:
        start, length = sequence * problem.length, problem.length
    else:
        of_batch = starts + batch * (problem.N + 1)
        start = tl.load(of_batch + sequence)
        length = tl.load(of_batch + sequence + 1) - start
    tokens = tl.where((length >= schedule.least) & (length <= schedule.most), tokens, 0)
    tokens = tl.minimum(tokens, schedule.tokens)
    position = context_of(context_lens, batch, sequence, problem) - length + token - start
    return (
        batch,
        sequence,
        token,
        tokens,
        position,
        page * problem.page,
        (page + pages) * problem.page,
        slot,
        split,
        splits,
    )


@triton.jit
def keys_of_tokens(position, context, problem: tl.constexpr):
    """The keys first ≤ j < stop that tokens at these positions see, drafts aside: `interval` of _visibility.py."""
    stop = tl.minimum(context, problem.page * max(problem.columns, 1))
    if problem.causal and problem.draft_words == 0:
        stop = tl.minimum(position + 1, stop)
    first = 0
    if problem.left is not None:
        first = tl.maximum(position - problem.left, 0)
    return first, stop


@triton.jit
def keys_of_row(batch, sequence, position, tokens, context_lens, first_keys, problem: tl.constexpr):
    """The keys low ≤ j < high that some token of a row sees, whose first token stands at this position."""
    context = context_of(context_lens, batch, sequence, problem)
    low, _ = keys_of_tokens(position, context, problem)
    _, high = keys_of_tokens(position + tokens - 1, context, problem)
    if first_keys is not None:
        low = tl.maximum(low, tl.load(first_keys + batch * problem.N + sequence))
    # Tokens before the first position are in no context.
    return low, tl.where(position + tokens > 0, high, 0)


@triton.jit
def cached_keys(batch, sequence, context_lens, starts, problem: tl.constexpr):
    """The number of keys that were there before the step; negative for a sequence of fewer keys than tokens."""
    of_batch = starts + batch * (problem.N + 1) + sequence
    return tl.load(context_lens + batch * problem.N + sequence) - (tl.load(of_batch + 1) - tl.load(of_batch))


@triton.jit
def split_of_keys(low, high, split, BLOCK_K: tl.constexpr, schedule: tl.constexpr):
    """Which of the keys low ≤ j < high are those of a split: whole tiles, evenly or from fixed keys on."""
    if schedule.keys_per_split:
        begin = split * schedule.keys_per_split
        return tl.maximum(low, begin), tl.minimum(high, begin + schedule.keys_per_split)
    elif schedule.splits == 1:
        return low, high
    else:
        first = low // BLOCK_K
        each = tl.cdiv(tl.cdiv(high, BLOCK_K) - first, schedule.splits)
        begin = (first + split * each) * BLOCK_K
        return tl.maximum(low, begin), tl.minimum(high, begin + each * BLOCK_K)
