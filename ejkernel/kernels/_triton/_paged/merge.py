"""Merges what the splits of a row's keys have left, and the sinks, in the order of the splits:

lse = log(Σ_p exp lse_p + Σ_x exp sinks_x),    o = Σ_p exp(lse_p − lse) o_p
"""

import triton
import triton.language as tl

from .attend import LN2, with_sinks
from .work import item_of_plan, row_of_program

SPLITS_PER_TILE = 16


@triton.jit
def merge_kernel(
    context_lens, starts, num_seqs, sinks, plan, o_splits, lse_splits,
    o, lse,
    problem: tl.constexpr, schedule: tl.constexpr, SPLITS: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """A program has one head of one token of a row."""
    head = tl.program_id(0) % problem.H
    of_token = tl.program_id(0) // problem.H % schedule.tokens
    unit = tl.program_id(0) // (problem.H * schedule.tokens)
    if plan is None:
        batch, _, token, tokens, position = row_of_program(unit, context_lens, starts, num_seqs, problem, schedule)
        slot, splits = unit * schedule.splits, schedule.splits
    else:
        batch, _, token, tokens, position, _, _, slot, split, splits = item_of_plan(
            unit, plan, context_lens, starts, problem, schedule
        )
        slot += batch * (2 * schedule.items)
        tokens = tl.where((split == 0) & (splits > 1), tokens, 0)
    if of_token >= tokens:
        return
    e, s = tl.arange(0, V_WIDTH), tl.arange(0, SPLITS)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, V_WIDTH], tl.float32)
    for first in tl.range(0, splits, SPLITS):
        at = ((slot + first + s).to(tl.int64) * schedule.tokens + of_token) * problem.H + head
        there = first + s < splits
        of_split = tl.load(lse_splits + at, mask=there, other=float("-inf"))
        parts = tl.load(
            o_splits + at[:, None] * problem.V + e[None, :], mask=there[:, None] & (e < problem.V)[None, :], other=0.0
        )
        highest = tl.maximum(maximum, tl.max(of_split, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(of_split - base)
        alpha = tl.exp2(maximum - base)
        total = total * alpha + tl.sum(weights, 0)
        acc = acc * alpha[:, None] + tl.sum(parts * weights[:, None], 0)[None, :]
        maximum = highest
    heads = tl.zeros([1], tl.int32) + head
    maximum, total, acc = with_sinks(
        maximum, total, acc, position + of_token + heads * 0, sinks, batch, heads, heads >= 0, problem
    )
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    if (token + of_token >= 0) & (token + of_token < problem.T):
        at = ((batch * problem.T + token + of_token) * problem.H + heads).to(tl.int64)
        tl.store(o + at[:, None] * problem.V + e[None, :], acc.to(o.dtype.element_ty), mask=(e < problem.V)[None, :])
        tl.store(lse + at, maximum * LN2 + tl.log(total))
