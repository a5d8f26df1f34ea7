"""What a program of the kernels over a cache computes: which tokens, and which of their keys."""

import triton
import triton.language as tl


@triton.jit
def row_of_program(unit, context_lens, starts, num_seqs, problem: tl.constexpr, schedule: tl.constexpr):
    """The row of a program: batch, sequence, first token in the step, tokens (0 is no work), and its first position.

    `unit` counts the rows of all batches.
    """
    batch = unit // schedule.rows
    row = unit % schedule.rows
    if starts is None:
        sequence = row
        start = row * problem.length
        length = problem.length
        before = 0
    else:
        count = tl.minimum(tl.maximum(tl.load(num_seqs + batch), 0), problem.N)
        sequence = row
        of_batch = starts + batch * (problem.N + 1)
        if schedule.search:
            # Row r is of the last sequence n with starts[n] // tokens + n <= r, which has rows enough from there.
            n = tl.arange(0, triton.next_power_of_2(problem.N))
            begin = tl.load(of_batch + n, mask=n < count, other=0)
            sequence = tl.sum(((n < count) & (begin // schedule.tokens + n <= row)).to(tl.int32)) - 1
        inside = (sequence >= 0) & (sequence < count)
        sequence = tl.where(inside, sequence, 0)
        start = tl.load(of_batch + sequence)
        length = tl.where(inside, tl.load(of_batch + sequence + 1) - start, 0)
        length = tl.where((length >= schedule.least) & (length <= schedule.most), length, 0)
        before = 0
        if schedule.search:
            before = (row - start // schedule.tokens - sequence) * schedule.tokens
    tokens = tl.minimum(tl.maximum(length - before, 0), schedule.tokens)
    context = context_of(context_lens, batch, sequence, problem)
    return batch, sequence, start + before, tokens, context - length + before


@triton.jit
def context_of(context_lens, batch, sequence, problem: tl.constexpr):
    """How many keys a sequence has; all of its page where nothing says."""
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
    # What splits leave stays within its arrays, whatever a plan says.
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
def keys_of_row(batch, sequence, position, tokens, context_lens, first_keys, problem: tl.constexpr):
    """The keys low ≤ j < high that some token of a row sees, whose first token stands at this position."""
    context = context_of(context_lens, batch, sequence, problem)
    high = context
    if problem.causal and problem.drafts == 0:
        high = tl.minimum(position + tokens, context)
    high = tl.minimum(high, problem.page * max(problem.columns, 1))
    low = 0
    if problem.left is not None:
        low = tl.maximum(position - problem.left, 0)
    if first_keys is not None:
        low = tl.maximum(low, tl.load(first_keys + batch * problem.N + sequence))
    # Tokens before the first position are in no context.
    return low, tl.where(position + tokens > 0, high, 0)


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
