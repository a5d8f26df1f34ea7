"""multi_latent_page_attention as an operation: from public arguments to those of the primitive, and back."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int8, Int32, Integer

from ...errors import value_error
from ...primitives.multi_latent_page_attention import Operands
from ...primitives.multi_latent_page_attention import multi_latent_page_attention as primitives
from ...types import Sinks, Window
from ...types.multi_latent_page_attention import MultiLatentPageAttentionConfig
from .._operation import Operation, Prepared
from ._arguments import (
    align,
    array,
    array_or_none,
    int32,
    require_dtype,
    require_known,
    require_rank,
    require_same_dtype,
    static_bool,
)
from ._attention import sinks_of_heads
from ._pages import (
    RENAMED,
    cache_spec,
    check_cache,
    check_tables,
    count_of_sequences,
    mask_of_drafts,
    plan_of_step,
    scale_of_pages,
    synthetic_step,
)

NAME = primitives.name


def multi_latent_page_attention_arguments(
    q_latent: Float[Array, "tokens q_heads latent_dim"],
    q_rope: Float[Array, "tokens q_heads rope_dim"],
    pages: Float[Array, "pages page_size latent_dim+rope_dim"] | Int8[Array, "pages page_size latent_dim+rope_dim"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    sinks: Sinks | None = None,
    k_scale: float | Float[Array, ""] | Float[Array, " 1"] | Float[Array, "pages page_size 1"] | None = None,
    plan: Int32[Array, "rows items 8"] | None = None,
    draft_mask: Bool[Array, "tokens drafts"] | None = None,
    indices: Integer[Array, "tokens top_k"] | None = None,
    *,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Prepared[
    Float[Array, "tokens q_heads latent_dim"]
    | tuple[Float[Array, "tokens q_heads latent_dim"], Float[Array, "tokens q_heads"]]
]:
    """Multi-head latent attention over a paged cache in its absorbed form, for any mix of prefill, decode and drafts.

    For each position the cache holds one latent c_j [R] and one rotary part r_j [Dr], shared by all heads. The
    projection of keys is absorbed into the queries; that of values is applied to o by the caller. Token i of sequence
    n, at position p = context_lens[n] − q_len[n] + i, sees the positions j ≤ p, within the window:

        s_j = softmax_scale · (q_latent·c_j + q_rope·r_j),   then softcap · tanh(s_j / softcap)
        lse = log(Σ_j exp s_j + Σ_x exp sinks_x),   o = Σ_j exp(s_j − lse) · c_j

    Position j is in slot j % page of page block_tables[n, j // page], also for the tokens of the step. Forward only: it
    has no derivative. Slots past a context may hold anything, even NaN.

    With `indices` it is DeepSeek's sparse attention: the sums are over the positions j in the token's own list that it
    sees. Time grows with the lengths of the lists, not of the contexts; no other slot is read.

    Args:
        q_latent: the queries [T, H, R] of the step's tokens against latents, one sequence after the other: the part
            of q without rotary embedding, [T, H, Dn], times the projection of keys, Σ_d q_td · w_kc[r, h, d].
        q_rope: their rotary parts [T, H, Dr], in the same float dtype.
        pages: the pool [P, page, R + Dr], latents followed by their rotary parts, in that dtype, float8_e4m3fn or int8.
        context_lens: [N] integers: the tokens of each sequence, those of the step included.
        block_tables: [N, pages of a sequence] integers: where the pages of a sequence are in the pool. Entries past its
            context may be anything. A page outside the pool is read as the nearest one in it.
        query_start_loc: [N + 1] integers, ascending: sequence n has the tokens from entry n to entry n + 1.
        num_seqs: how many of the N sequences are in use, [1] integers or an int; the entries of the others, and tokens
            past query_start_loc[num_seqs], may hold anything.
        sinks: [H] or [H, n] float logits that join the denominator of every row, with no value.
        k_scale: a float factor of all numbers in the pages: a scalar, [1], or [P, page, 1] for each slot.
        plan: a work list by `page_plan` of these lengths. It is checked, but no implementation uses it yet: results are
            the same with and without it.
        draft_mask: [T, W] bool, a tree of speculated tokens, as in `ragged_page_attention`.
        indices: [T, n] integers, for each token the positions in its own sequence of the keys that it attends to, in
            any order, as `lightning_indexer` makes them. Entries of −1, and positions that the token would not see
            without a list (after its own, outside its window, or drafts of other branches), are skipped. A position
            that is listed twice counts twice, as in the sparse prefill of FlashMLA: the sums are over the list.
        window: an int w, the w keys that end with the token's own, or a pair (left, right); causality makes right 0.
        softcap: bound of the logits.
        softmax_scale: a static number; by default (R + Dr)**-0.5, from the features that are multiplied here. Models
            usually need (Dn + Dr)**-0.5, but Dn is not known here.
        num_splits: the number of parts of a token's keys that are computed in parallel, if the implementation is not to
            choose it; at most the number of pages. It changes only the rounding.
        return_lse: also return lse.
        batch_invariant: only implementations that give a token the same bits whatever else is in the step.

    Returns:
        o [T, H, R] in q_latent's dtype; with return_lse (o, lse [T, H] float32). Tokens of no sequence, and
        those at a negative position, have o = 0 and lse = −∞, with sinks too.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        NotImplementedError: a derivative is asked for.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    DeepSeek-V2, arXiv 2405.04434; PagedAttention, arXiv 2309.06180; lists: DeepSeek-V3.2, arXiv 2512.02556.
    """
    arrays = dict(q_latent=q_latent, q_rope=q_rope, pages=pages)
    q_latent, q_rope, pages = (array(NAME, name, x) for name, x in arrays.items())
    tables = dict(context_lens=context_lens, block_tables=block_tables, query_start_loc=query_start_loc)
    tables = {name: array(NAME, name, x) for name, x in tables.items()}
    _check_arrays(q_latent, q_rope, pages)
    check_tables(NAME, **tables)
    (tokens, heads, _), count = q_latent.shape, tables["context_lens"].shape[0]
    operands = Operands(
        q_latent[None],
        q_rope[None],
        pages[None],
        **{name: int32(x)[None] for name, x in tables.items()},
        num_seqs=count_of_sequences(NAME, num_seqs, **tables),
        sinks=sinks_of_heads(NAME, sinks, heads, q_latent),
        k_scale=scale_of_pages(NAME, "k_scale", k_scale, pages, 1, q_latent),
        plan=plan_of_step(NAME, plan, count, count + tokens),
        draft_mask=mask_of_drafts(NAME, draft_mask, tokens),
        indices=_lists_of_keys(indices, tokens),
    )
    if softmax_scale is None:
        require_known(NAME, "the number of features, of which softmax_scale is a power,", pages.shape[2], pages=pages)
        softmax_scale = pages.shape[2] ** -0.5
    most = tables["block_tables"].shape[1]
    spec = cache_spec(NAME, q_latent, window, softcap, softmax_scale, num_splits, most, batch_invariant=batch_invariant)
    return_lse = static_bool(NAME, "return_lse", return_lse)
    named = align(primitives.forward, {name: x for name, x in operands._asdict().items() if x is not None})
    return Prepared(named, spec, lambda out: (out["o"][0], out["lse"][0]) if return_lse else out["o"][0])


def _check_arrays(q_latent, q_rope, pages) -> None:
    shown = dict(q_latent=q_latent, q_rope=q_rope)
    require_rank(NAME, 3, "tokens, heads, features", **shown)
    require_rank(NAME, 3, "pages, slots of a page, features of a latent and of its rotary part", pages=pages)
    require_same_dtype(NAME, **shown)
    check_cache(NAME, q_latent, pages=pages)
    if q_rope.shape[:2] != q_latent.shape[:2] or q_rope.shape[2] == 0:
        rule = f"q_rope must be {list(q_latent.shape[:2])} of features, at least one, as q_latent is"
        raise value_error(NAME, rule, **shown)
    if pages.shape[2] != q_latent.shape[2] + q_rope.shape[2]:
        both = f"q_latent and q_rope have {q_latent.shape[2]} and {q_rope.shape[2]}"
        rule = "pages must have as many as both"
        raise value_error(NAME, f"pages has {pages.shape[2]} features but {both}; {rule}", **shown, pages=pages)


def _lists_of_keys(indices, tokens: Any):
    """The lists `indices` [tokens, keys] as [1, tokens, keys] int32; None without lists."""
    indices = array_or_none(NAME, "indices", indices)
    if indices is None:
        return None
    require_rank(NAME, 2, "tokens, keys of each", indices=indices)
    require_dtype(NAME, np.integer, "an integer type", indices=indices)
    if indices.shape[0] != tokens or indices.shape[1] == 0:
        raise value_error(NAME, f"indices must be [{tokens}, keys], at least one key", indices=indices)
    return int32(indices)[None]


class MultiLatentPageAttention(Operation):
    """Latent attention over a paged cache: `ejkernel.lax.multi_latent_page_attention` as a kernel object."""

    algorithm = primitives
    config_class = MultiLatentPageAttentionConfig
    prepare_arguments = staticmethod(multi_latent_page_attention_arguments)
    renamed: ClassVar = RENAMED

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with four sequences that share 64 tokens and have four pages of 16 slots each."""
        array = jax.ShapeDtypeStruct
        shapes = dict(q_latent=(64, 2, 512), q_rope=(64, 2, 64), pages=(16, 16, 576))
        tables = dict(context_lens=(4,), block_tables=(4, 4), query_start_loc=(5,), num_seqs=(1,))
        made = {name: array(of, jnp.bfloat16) for name, of in shapes.items()}
        return made | {name: array(of, jnp.int32) for name, of in tables.items()}

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Random arrays; sequences have equal shares of the tokens, and contexts of three quarters of their pages."""
        made = synthetic_step(operands, operands["q_latent"].shape[1], *operands["pages"].shape[1:3])
        if (lists := operands.get("indices")) is not None:
            made["indices"] = _spread(lists.shape, made["context_lens"].min())
        return made


def _spread(shape: tuple[int, int, int], context: Any) -> jax.Array:
    """Lists of positions that are spread over the context, and differ between tokens."""
    batch, token, entry = (jnp.arange(size, dtype=jnp.int32) for size in shape)
    return (104729 * (batch[:, None, None] + token[:, None]) + 7919 * entry) % context
