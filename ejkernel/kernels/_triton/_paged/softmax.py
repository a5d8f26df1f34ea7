"""The softmax of rows before their keys, and their epilogue: merges splits, adds the sinks, and stores o and lse.

Statistics are relative to maxima in logits of base 2.
"""

import triton
import triton.language as tl

from .work import tokens_of_sequences

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softmax_before(
    o, lse, at, in_step, e, problem: tl.constexpr, ROWS: tl.constexpr, V_WIDTH: tl.constexpr, PAIRS: tl.constexpr
):
    """The softmax of rows before their keys: of nothing, or what stands in their place where only drafts are left."""
    if problem.only_drafts:
        maximum = LOG2E * tl.load(lse + at, mask=in_step, other=float("-inf"))
        total = (maximum > float("-inf")).to(tl.float32)
        mask = in_step[:, None] & (e < problem.V)[None, :]
        acc = tl.load(o + at[:, None] * problem.V + e[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if PAIRS:
            acc = tl.zeros([ROWS, V_WIDTH // 2], tl.float32), tl.zeros([ROWS, V_WIDTH // 2], tl.float32)
        else:
            acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    return maximum, total, acc


@triton.jit
def merged(
    o_splits, lse_splits, at, in_row, splits,
    problem: tl.constexpr, schedule: tl.constexpr, SPLITS: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """The softmax of rows [r] from what their splits have left, in the order of these, SPLITS at a time:

    total = Σ_p 2^(lse_p − maximum),    acc = Σ_p 2^(lse_p − maximum) o_p

    `at` [r] is where the first split of each is. Other programs have written them: the L1 cache is not asked.
    """
    ROWS: tl.constexpr = at.shape[0]
    e, s = tl.arange(0, V_WIDTH), tl.arange(0, SPLITS)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    for first in tl.range(0, splits, SPLITS):
        there = (first + s < splits)[:, None] & in_row[None, :]
        of = at[None, :] + ((first + s).to(tl.int64) * (schedule.tokens * problem.H))[:, None]
        of_split = tl.load(lse_splits + of, mask=there, other=float("-inf"), cache_modifier=".cg")
        parts = tl.load(
            o_splits + of[:, :, None] * problem.V + e[None, None, :],
            mask=there[:, :, None] & (e < problem.V)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        highest = tl.maximum(maximum, tl.max(of_split, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(of_split - base[None, :])
        alpha = tl.exp2(maximum - base)
        total = total * alpha + tl.sum(weights, 0)
        acc = acc * alpha[:, None] + tl.sum(parts * weights[:, :, None], 0)
        maximum = highest
    return maximum, total, acc


@triton.jit
def write(
    o, lse, at, in_step, maximum, total, acc, place, sinks, batch, head, problem: tl.constexpr, V_WIDTH: tl.constexpr
):
    """o and lse of rows whose keys are all in the softmax, after the sinks; `at` is where they stand."""
    e = tl.arange(0, V_WIDTH)
    maximum, total, acc = with_sinks(maximum, total, acc, place, sinks, batch, head, in_step, problem)
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        o + at[:, None] * problem.V + e[None, :],
        acc.to(o.dtype.element_ty),
        mask=in_step[:, None] & (e < problem.V)[None, :],
    )
    tl.store(lse + at, maximum * LN2 + tl.log(total), mask=in_step)


@triton.jit
def write_padding(
    o, lse, batch, place, of_token, head, starts, num_seqs,
    problem: tl.constexpr, schedule: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores o = 0 and lse = −∞ for the place-th row of tokens that belong to no sequence."""
    e = tl.arange(0, V_WIDTH)
    first, last = tokens_of_sequences(starts, num_seqs, batch, problem)
    token = tl.where(place < first, place, place - first + last)
    there = (of_token < schedule.tokens) & (token < problem.T)
    at = ((batch * problem.T + token) * problem.H + head).to(tl.int64)
    nothing = tl.zeros([at.shape[0], V_WIDTH], o.dtype.element_ty)
    tl.store(o + at[:, None] * problem.V + e[None, :], nothing, mask=there[:, None] & (e < problem.V)[None, :])
    tl.store(lse + at, tl.full([at.shape[0]], float("-inf"), tl.float32), mask=there)


@triton.jit
def with_sinks(maximum, total, acc, place, sinks, batch, head, in_row, problem: tl.constexpr):
    """The softmax with the sinks of each row's head; none at all for a token that is in no context."""
    count: tl.constexpr = problem.sinks
    if count:
        of_head = sinks + batch * problem.sinks_batch + head * count
        highest = maximum
        for x in tl.static_range(count):
            highest = tl.maximum(highest, tl.load(of_head + x, mask=in_row, other=float("-inf")) * LOG2E)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        alpha = tl.exp2(maximum - base)
        total *= alpha
        acc *= alpha[:, None]
        for x in tl.static_range(count):
            total += tl.exp2(tl.load(of_head + x, mask=in_row, other=float("-inf")) * LOG2E - base)
        maximum = highest
    if not problem.sinks_of_empty:
        acc = tl.where((place >= 0)[:, None], acc, 0.0)
        total = tl.where(place >= 0, total, 0.0)
        maximum = tl.where(place >= 0, maximum, float("-inf"))
    return maximum, total, acc
