"""Merges what many splits of a row's keys have left, and the sinks, by more programs than the row has for its keys:

lse = log(Σ_p exp lse_p + Σ_x exp sinks_x),    o = Σ_p exp(lse_p − lse) o_p
"""

import triton
import triton.language as tl

from .softmax import merged, write, write_padding
from .work import row_of_program


@triton.jit
def merge_kernel(
    context_lens, starts, num_seqs, sinks, tiled_keys, o_splits, lse_splits,
    o, lse,
    problem: tl.constexpr, schedule: tl.constexpr, SPLITS: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """A program has one head of one token of a row, or of those of no sequence that a row stands for."""
    head = tl.program_id(0) % problem.H
    of_token = tl.program_id(0) // problem.H % schedule.tokens
    unit = tl.program_id(0) // (problem.H * schedule.tokens)
    batch, _, token, tokens, position = row_of_program(
        unit, context_lens, starts, num_seqs, tiled_keys, problem, schedule
    )
    heads = tl.zeros([1], tl.int32) + head
    if of_token >= tokens:
        if schedule.padding and tokens == 0:
            places = of_token + heads * 0
            write_padding(o, lse, batch, token + places, places, heads, starts, num_seqs, problem, schedule, V_WIDTH)
        return
    at = ((unit * schedule.splits).to(tl.int64) * schedule.tokens + of_token) * problem.H + heads
    maximum, total, acc = merged(
        o_splits, lse_splits, at, heads >= 0, schedule.splits, problem, schedule, SPLITS, V_WIDTH
    )
    in_step = (heads >= 0) & (token + of_token >= 0) & (token + of_token < problem.T)
    at = ((batch * problem.T + token + of_token) * problem.H + heads).to(tl.int64)
    place = position + of_token + heads * 0
    write(o, lse, at, in_step, maximum, total, acc, place, sinks, batch, heads, problem, V_WIDTH)
