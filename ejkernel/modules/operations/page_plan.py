"""page_plan, composed of JAX operations, without a primitive of its own."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Integer

from ...errors import value_error
from ...kernels._page_plan import decode_rows, ragged_rows, work_list
from ...types import Window
from .._composed import composed
from ._arguments import array, int32, require_dtype, require_rank, size_of, window_pair
from ._attention import FAR
from ._pages import count_of_sequences, require_whole

NAME = "page_plan"


@composed
def page_plan(
    context_lens: Integer[Array, " sequences"],
    query_start_loc: Integer[Array, " sequences+1"] | None = None,
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"] | None = None,
    *,
    page_size: int,
    num_tokens: int | None = None,
    tokens_per_item: int = 16,
    drafts: int | None = None,
    window: Window | None = None,
    workers: int = 128,
) -> Int32[Array, "rows items 8"]:
    """The work list of a step of serving, for `page_attention` or `ragged_page_attention` in all layers of the step.

    A row is a group of tokens of one sequence that are computed together: the one token of a decode, or up to
    tokens_per_item of a prefill. The pages that they see are split into work items, none with more than an equal share
    of the pages of all rows, so that programs that run in parallel end at about the same time:

        share = ⌈Σ_rows pages / workers⌉,   items of a row = max(1, ⌈pages / share⌉)

    It is computed on the device from lengths that may be traced; its size depends on static numbers only. The
    operations make a plan themselves if none is given, and their results are the same with and without it.

    The last axis has the eight numbers of an item:

        0  request   the sequence whose pages these are
        1  token     the first of its tokens in the step
        2  tokens    how many; 0 is no work
        3  page      the first page, counted in the sequence's own table
        4  pages     how many; 0 where the tokens see no key
        5  slot      where the partial result goes, of 2·R·(I − 1) slots; −1 where the item is all of its row
        6  split     which of the row's items it is: slot − split is the slot of the first
        7  splits    how many the row has, whose partial results are merged by their lse

    Args:
        context_lens: [N] integers: the tokens of each sequence, those of the step included.
        query_start_loc: [N + 1] integers, ascending: sequence n has the tokens from entry n to entry n + 1 of the step,
            for `ragged_page_attention`. Not given for `page_attention`, where each sequence has one token.
        num_seqs: how many of the N sequences are in use, with query_start_loc; by default all of them.
        page_size: the number of slots in a page.
        num_tokens: T, the largest number of tokens of the step, with padding; with query_start_loc.
        tokens_per_item: the largest number of tokens in a row; with query_start_loc.
        drafts: W of the draft_mask [T, W] that the operation is given, if any.
        window: the window of the operation.
        workers: the number of programs that share the pages, such as the multiprocessors of a GPU or a multiple of it.

    Returns:
        int32 [R, I, 8], the longest items first, followed by items without work; R = N, or N + ⌊T / tokens_per_item⌋
        with query_start_loc, and I = 1 + ⌈workers / R⌉.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.

    FlashInfer, arXiv 2501.01005; Flash-Decoding, 2023; Stream-K, arXiv 2301.03598.
    """
    context_lens = array(NAME, "context_lens", context_lens)
    require_rank(NAME, 1, "sequences", context_lens=context_lens)
    require_dtype(NAME, np.integer, "an integer type", context_lens=context_lens)
    if context_lens.shape[0] == 0:
        raise value_error(NAME, "context_lens has 0 sequences; there must be some", context_lens=context_lens)
    require_whole(NAME, 1, context_lens=context_lens)
    left = window_pair(NAME, window)[0]
    sizes = dict(page_size=page_size, workers=workers, tokens_per_item=tokens_per_item)
    if missing := [name for name, x in sizes.items() if x is None]:
        raise value_error(NAME, f"{', '.join(missing)} must be given")
    page_size, workers, tokens_per_item = (size_of(NAME, name, x) for name, x in sizes.items())
    how = dict(page_size=page_size, left=None if left is None or left >= FAR else left)
    if query_start_loc is None:
        _refuse_without_starts(num_seqs=num_seqs, num_tokens=num_tokens, drafts=drafts)
        return work_list(decode_rows(int32(context_lens), **how), workers)
    starts = array(NAME, "query_start_loc", query_start_loc)
    _check_starts(context_lens, starts, num_tokens)
    num_seqs = context_lens.shape[0] if num_seqs is None else num_seqs
    count = count_of_sequences(NAME, num_seqs, context_lens=context_lens)[0, 0]
    rows = ragged_rows(
        int32(context_lens),
        int32(starts),
        jnp.clip(count, 0, context_lens.shape[0]),
        size_of(NAME, "num_tokens", num_tokens),
        tokens_per_item=tokens_per_item,
        drafts=None if drafts is None else size_of(NAME, "drafts", drafts),
        **how,
    )
    return work_list(rows, workers)


def _refuse_without_starts(**given: Any) -> None:
    for name, x in given.items():
        if x is not None:
            raise value_error(NAME, f"{name} is given without query_start_loc, of which it says something")


def _check_starts(context_lens, starts, num_tokens) -> None:
    shown = dict(context_lens=context_lens, query_start_loc=starts)
    require_rank(NAME, 1, "sequences + 1", query_start_loc=starts)
    require_dtype(NAME, np.integer, "an integer type", query_start_loc=starts)
    require_whole(NAME, 1, query_start_loc=starts)
    if starts.shape[0] != context_lens.shape[0] + 1:
        wanted = f"{context_lens.shape[0] + 1} entries, one more than sequences"
        raise value_error(NAME, f"query_start_loc must have {wanted}", **shown)
    if num_tokens is None:
        raise value_error(NAME, "num_tokens must be given with query_start_loc: the size of the plan follows from it")
