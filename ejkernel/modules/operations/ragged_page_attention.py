"""ragged_page_attention as an operation: from public arguments to operands and spec of the primitive, and back."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int8, Int32, Integer

from ...errors import value_error
from ...primitives.ragged_page_attention import Operands
from ...primitives.ragged_page_attention import ragged_page_attention as primitives
from ...types import Sinks, Window
from ...types.ragged_page_attention_v3 import RaggedPageAttentionConfig
from .._operation import Operation, Prepared
from ._arguments import align, array, int32, require_rank, static_bool
from ._attention import sinks_of_heads
from ._pages import (
    RENAMED,
    PageScale,
    by_heads,
    cache_spec,
    check_cache,
    check_heads,
    check_tables,
    count_of_sequences,
    mask_of_drafts,
    plan_of_step,
    scale_of_pages,
    synthetic_step,
)

NAME = primitives.name


def ragged_page_attention_arguments(
    q: Float[Array, "tokens q_heads head_dim"],
    kv_pages: Float[Array, "pages page_size keys_and_values head_dim"]
    | Int8[Array, "pages page_size keys_and_values head_dim"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    sinks: Sinks | None = None,
    k_scale: PageScale | None = None,
    v_scale: PageScale | None = None,
    draft_mask: Bool[Array, "tokens drafts"] | None = None,
    plan: Int32[Array, "rows items 8"] | None = None,
    *,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Prepared[
    Float[Array, "tokens q_heads head_dim"]
    | tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]
]:
    """A step of serving over a paged cache, for any mix of prefill, chunks of a prefill, decode and drafts.

    In the step sequence n has q_len[n] = query_start_loc[n + 1] − query_start_loc[n] tokens; its token i is at position
    p = context_lens[n] − q_len[n] + i. The keys and values of these tokens are already in the cache; those of position
    j are in slot j % page of page block_tables[n, j // page]. A token sees the positions j ≤ p, within the window:

        s_j = softmax_scale · q·k_j,   then softcap · tanh(s_j / softcap)
        lse = log(Σ_j exp s_j + Σ_x exp sinks_x),   o = Σ_j exp(s_j − lse) · v_j

    Forward only: it has no derivative. Slots past a context may hold anything, even NaN.

    Args:
        q: the queries [T, H, D] of the step's tokens, one sequence after the other, of a float dtype.
        kv_pages: the pool [P, page, 2G, D], keys at even and values at odd indices of the third axis, in q's dtype,
            float8_e4m3fn or int8; H is a multiple of G, and query head h uses head h // (H // G).
        context_lens: [N] integers: the tokens of each sequence, those of the step included.
        block_tables: [N, pages of a sequence] integers: where the pages of a sequence are in the pool. Entries past its
            context may be anything. A page outside the pool is read as the nearest one in it.
        query_start_loc: [N + 1] integers, ascending: sequence n has the tokens from entry n to entry n + 1.
        num_seqs: how many of the N sequences are in use, [1] integers or an int; the entries of the others, and tokens
            past query_start_loc[num_seqs], may hold anything.
        sinks: [H] or [H, n] float logits that join the denominator of every row, with no value.
        k_scale: a float factor of the keys: a scalar, [G], or [P, page, G] for each slot and head.
        v_scale: a factor of the values, likewise.
        draft_mask: [T, W] bool, a tree of draft tokens: a token sees the keys from before the step, and of the new keys
            j < W of its sequence those whose entry is True. Among the new keys it replaces causality; a window counts
            positions.
        plan: a work list for the programs of a GPU, by `page_plan` of these lengths, drafts and window, once for all
            layers of a step; sequences with few tokens follow it. Results are the same without it; with batch_invariant
            it is not used.
        window: an int w, the w keys that end with the token's own, or a pair (left, right); causality makes right 0.
        softcap: bound of the logits.
        softmax_scale: D**-0.5 by default; a static number.
        num_splits: the number of parts of a token's keys that are computed in parallel, if the implementation is not to
            choose it; at most the number of pages. It changes only the rounding.
        return_lse: also return lse.
        batch_invariant: only implementations that give a token the same bits whatever else is in the step.

    Returns:
        o [T, H, D] in q's dtype; with return_lse (o, lse [T, H] float32). Tokens of no sequence, and
        those at a negative position, have o = 0 and lse = −∞, with sinks too.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        NotImplementedError: a derivative is asked for.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    PagedAttention, arXiv 2309.06180; Ragged Paged Attention, arXiv 2604.15464; trees of drafts, arXiv 2305.09781.
    """
    q, kv_pages = array(NAME, "q", q), array(NAME, "kv_pages", kv_pages)
    tables = dict(context_lens=context_lens, block_tables=block_tables, query_start_loc=query_start_loc)
    tables = {name: array(NAME, name, x) for name, x in tables.items()}
    _check_arrays(q, kv_pages)
    check_tables(NAME, **tables)
    (tokens, heads, _), groups, count = q.shape, kv_pages.shape[2] // 2, tables["context_lens"].shape[0]
    operands = Operands(
        q[None],
        by_heads(NAME, kv_pages),
        **{name: int32(x)[None] for name, x in tables.items()},
        num_seqs=count_of_sequences(NAME, num_seqs, **tables),
        sinks=sinks_of_heads(NAME, sinks, heads, q),
        k_scale=scale_of_pages(NAME, "k_scale", k_scale, kv_pages, groups, q),
        v_scale=scale_of_pages(NAME, "v_scale", v_scale, kv_pages, groups, q),
        draft_mask=mask_of_drafts(NAME, draft_mask, q.shape[0]),
        plan=plan_of_step(NAME, plan, count, count + tokens),
    )
    most = tables["block_tables"].shape[1]
    spec = cache_spec(NAME, q, window, softcap, softmax_scale, num_splits, most, batch_invariant=batch_invariant)
    return_lse = static_bool(NAME, "return_lse", return_lse)
    named = align(primitives.forward, {name: x for name, x in operands._asdict().items() if x is not None})
    return Prepared(named, spec, lambda out: (out["o"][0], out["lse"][0]) if return_lse else out["o"][0])


def _check_arrays(q, kv_pages) -> None:
    require_rank(NAME, 3, "tokens, heads, features", q=q)
    require_rank(NAME, 4, "pages, slots of a page, keys and values of each head, features", kv_pages=kv_pages)
    check_cache(NAME, q, kv_pages=kv_pages)
    both = kv_pages.shape[2]
    if both % 2:
        rule = "there must be a key and a value for each"
        raise value_error(NAME, f"kv_pages has {both} keys and values of heads; {rule}", q=q, kv_pages=kv_pages)
    check_heads(NAME, q, "kv_pages", kv_pages, groups=both // 2, features=kv_pages.shape[3])


class RaggedPageAttention(Operation):
    """A step of serving over a paged cache: `ejkernel.lax.ragged_page_attention` as a kernel object."""

    algorithm = primitives
    config_class = RaggedPageAttentionConfig
    prepare_arguments = staticmethod(ragged_page_attention_arguments)
    renamed: ClassVar = RENAMED

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with four sequences that share 192 tokens and have four pages of 16 slots each."""
        array = jax.ShapeDtypeStruct
        q, pages = (array(shape, jnp.bfloat16) for shape in ((192, 2, 128), (16, 16, 2, 128)))
        tables = dict(context_lens=(4,), block_tables=(4, 4), query_start_loc=(5,), num_seqs=(1,))
        return dict(q=q, kv_pages=pages, **{name: array(of, jnp.int32) for name, of in tables.items()})

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Random arrays; sequences have equal shares of the tokens, and contexts of three quarters of their pages."""
        return synthetic_step(operands, operands["q"].shape[1], *operands["kv_pages"].shape[1:3])
