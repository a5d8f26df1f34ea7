"""The best blocks of each query of a tile, in the order of their scores.

The scores of a query are √blocks runs of √blocks, of each of which the best is kept: the best of all runs is taken,
and the next best of its run comes in its place. So a block of a list costs 2 √blocks comparisons.
"""

import triton
import triton.language as tl

LAST = tl.constexpr(2**31 - 1)


@triton.jit
def find_best(
    scores, best, before, stop, batch, token, first, end,
    problem: tl.constexpr, QUERIES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Stores the best key of each run of a tile's queries, AHEAD runs at a time."""
    row, run = tl.arange(0, QUERIES * AHEAD) // AHEAD, tl.arange(0, QUERIES * AHEAD) % AHEAD
    low, high, _ = limits(before, stop, batch, token + row, first, problem)
    for number in tl.range(0, tl.cdiv(end - first, problem.RUN), AHEAD):
        key = keys(scores, row, number + run, low, high, problem)
        tl.store(best + row * problem.RUNS + number + run, tl.max(key, 1))


@triton.jit
def choose(
    scores, best, before, stop, lists, batch, group, token, row, first, end,
    problem: tl.constexpr, TOGETHER: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Stores the lists of some queries of a tile, whose scores are those of the slots from `first` to `end`.

    COUNT is that of a list, or the next power of two.
    """
    row += tl.arange(0, TOGETHER)
    query, n = token + row, tl.arange(0, COUNT)[None, :]
    low, high, visible = limits(before, stop, batch, query, first, problem)
    own = (visible - 1) // problem.size
    blocks = tl.where(n == 0, own[:, None], tl.where((n == 1) & (own[:, None] > 0), 0, -1))
    blocks = tl.where(visible[:, None] > 0, blocks, -1)
    if problem.count > 2:
        run = tl.arange(0, problem.RUNS)[None, :]
        given = run * problem.RUN < end - first
        best_of_run = tl.load(best + row[:, None] * problem.RUNS + run, mask=given, other=-1)
        for number in tl.range(2, problem.count):
            key = tl.max(best_of_run, 1)
            place = tl.where(key >= 0, LAST - (key & LAST), 0).to(tl.int32)
            # The slot before `low` is that of the first block.
            block = tl.where(key >= 0, place - low + 1, -1)
            blocks = tl.where(n == number, block[:, None], blocks)
            others = keys(scores, row, place // problem.RUN, low, high, problem)
            next_best = tl.max(tl.where(others < key[:, None], others, -1), 1)
            best_of_run = tl.where(run == (place // problem.RUN)[:, None], next_best[:, None], best_of_run)
    target = lists + ((batch * problem.S + query) * problem.G + group)[:, None] * problem.count + n
    tl.store(target, blocks, mask=(query < problem.S)[:, None] & (n < problem.count))


@triton.jit
def limits(before, stop, batch, query, first, problem: tl.constexpr):
    """The scores that decide for each query, from `low` to before `high`, and how many tokens it sees.

    They are those of the blocks after the first one and before its own, which may have ended with the query.
    """
    inside = query < problem.S
    visible = tl.load(stop + batch * problem.S + query, mask=inside, other=0)
    begin = tl.load(before + batch * problem.S + query, mask=inside, other=0) - first
    return begin + 1, begin + tl.minimum(visible // problem.size, (visible - 1) // problem.size), visible


@triton.jit
def keys(scores, row, run, low, high, problem: tl.constexpr):
    """Integers in the order in which the blocks of a run of scores are taken, a run for each row; −1 elsewhere.

    A score is not negative, and so ascends with its bits; of equal ones the earlier is taken.
    """
    place = run[:, None] * problem.RUN + tl.arange(0, problem.RUN)[None, :]
    given = (place >= low[:, None]) & (place < high[:, None])
    value = tl.load(scores + row[:, None] * problem.SCORES + place, mask=given, other=0.0)
    key = (value.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (LAST - place)
    return tl.where(given, key, -1)
