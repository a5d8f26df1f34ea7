"""lightning_indexer, composed of JAX operations, without a primitive of its own."""

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int8, Int32, Integer

from ...errors import type_error, value_error
from ...kernels._xla._index_scores import Indexed, best_keys
from ...ops.utils.operands import is_array
from .._composed import composed
from ._arguments import array, int32, require_dtype, require_rank, size_of, vary_alike
from ._pages import check_cache, check_tables, count_of_sequences, mask_of_drafts, require_whole, scale_of_pages

NAME = "lightning_indexer"


@composed
def lightning_indexer(
    q: Float[Array, "tokens index_heads index_dim"],
    weights: Float[Array, "tokens index_heads"],
    pages: Float[Array, "pages page_size index_dim"] | Int8[Array, "pages page_size index_dim"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    k_scale: float | Float[Array, ""] | Float[Array, " 1"] | Float[Array, "pages page_size 1"] | None = None,
    draft_mask: Bool[Array, "tokens drafts"] | None = None,
    *,
    top_k: int = 2048,
) -> Int32[Array, "tokens top_k"]:
    """The keys that each token of a step attends to in DeepSeek's sparse attention: those of the highest index scores.

    The indexer has a few narrow query heads, and one key for each position, shared by all heads. Token t scores the
    positions j of its sequence that it sees, its own included:

        I_tj = Σ_h w_th · relu(q_th · k_j)

    and lists the top_k of them, in descending order; of equal scores the earlier position comes first.
    `multi_latent_page_attention` takes the lists as `indices`, with the same lengths, and block tables of its own pool.
    Scores are computed for a block of tokens at a time, so that those of all tokens are never in memory together. It
    has no derivative: indexers are trained on their scores. Blocks are taken from all tokens and pages: on an Explicit
    mesh these must not be split, nor tables, scales of slots and draft masks, and `jax.vmap` must not map an array
    along a split axis. Inside `jax.shard_map` each device may have a step of its own.

    The caller applies rotary embeddings, or other functions of the model, to q and k before. A positive factor that all
    weights share does not affect the choice.

    Args:
        q: the indexer's queries [T, H, D] of the step's tokens, one sequence after the other.
        weights: w [T, H], of a float dtype.
        pages: the indexer's keys, [P, page, D] in q's dtype, float8_e4m3fn or int8, each in the slot of its position.
        context_lens: [N] integers: the tokens of each sequence, those of the step included.
        block_tables: [N, pages of a sequence] integers: where the pages of a sequence are in the pool.
        query_start_loc: [N + 1] integers, ascending: sequence n has the tokens from entry n to entry n + 1.
        num_seqs: how many of the N sequences are in use, [1] integers or an int.
        k_scale: a float factor of all numbers in the pages: a scalar, [1], or [P, page, 1] for each slot.
        draft_mask: [T, W] bool, a tree of draft tokens, as in `multi_latent_page_attention`.
        top_k: the number of positions in a list.

    Returns:
        indices int32 [T, top_k]; −1 where a token sees fewer keys, and for tokens of no sequence.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit; the message names operand, numbers and rule.

    DeepSeek-V3.2, arXiv 2512.02556, equation 1.
    """
    given = dict(q=q, weights=weights, pages=pages)
    q, weights, pages = (array(NAME, name, x) for name, x in given.items())
    tables = dict(context_lens=context_lens, block_tables=block_tables, query_start_loc=query_start_loc)
    tables = {name: array(NAME, name, x) for name, x in tables.items()}
    require_rank(NAME, 3, "tokens, heads, features", q=q)
    require_rank(NAME, 3, "pages, slots of a page, features", pages=pages)
    require_dtype(NAME, np.floating, "a float type", weights=weights)
    check_cache(NAME, q, pages=pages)
    if weights.shape != q.shape[:2]:
        raise value_error(NAME, f"weights must be {list(q.shape[:2])}, one of each head", q=q, weights=weights)
    if pages.shape[2] != q.shape[2]:
        rule = "they must be equal"
        raise value_error(NAME, f"pages has {pages.shape[2]} features but q has {q.shape[2]}; {rule}", q=q, pages=pages)
    check_tables(NAME, **tables)
    require_whole(NAME, 1, q=q, weights=weights)
    require_whole(NAME, 2, pages=pages, **tables)
    scale, mask = scale_of_pages(NAME, "k_scale", k_scale, pages, 1, q), mask_of_drafts(NAME, draft_mask, q.shape[0])
    others = dict(k_scale=k_scale, draft_mask=draft_mask)
    require_whole(NAME, 2, **{name: x for name, x in others.items() if is_array(x)})
    step = Indexed(
        q,
        weights,
        pages,
        None if scale is None else scale[0],
        **{name: int32(x) for name, x in tables.items()},
        num_seqs=count_of_sequences(NAME, num_seqs, **tables)[0],
        draft_mask=None if mask is None else mask[0],
    )
    if top_k is None:
        raise type_error(NAME, "top_k is None; it must be an int")
    count = size_of(NAME, "top_k", top_k)
    given = {name: x for name, x in step._asdict().items() if x is not None}
    return best_keys(jax.lax.stop_gradient(step._replace(**vary_alike(given))), count)
