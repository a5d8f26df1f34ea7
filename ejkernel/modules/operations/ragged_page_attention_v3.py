"""ragged_page_attention_v3 as an operation: from public arguments to operands and spec of the primitive, and back."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from ...errors import value_error
from ...primitives.ragged_page_attention_v3 import Operands
from ...primitives.ragged_page_attention_v3 import ragged_page_attention_v3 as primitives
from ...types import Sinks, Window
from ...types.ragged_page_attention_v3 import RaggedPageAttentionConfig
from .._operation import Operation, Prepared
from ._arguments import align, array, int32, require_dtype, require_rank, require_same_dtype, static_bool
from ._attention import sinks_of_heads
from ._pages import RENAMED, as_pool, by_heads, cache_spec, check_tables, count_of_sequences, synthetic_step

NAME = primitives.name


def ragged_page_attention_v3_arguments(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv_pages: Float[Array, "pages page_size 2*kv_heads head_dim"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    sinks: Sinks | None = None,
    *,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> Prepared[
    tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "pages page_size 2*kv_heads head_dim"]]
    | tuple[
        Float[Array, "tokens q_heads head_dim"],
        Float[Array, "tokens q_heads"],
        Float[Array, "pages page_size 2*kv_heads head_dim"],
    ]
]:
    """A step of serving: the step's keys and values go into a paged cache, over which its queries then attend.

    In the step sequence n has q_len[n] = query_start_loc[n + 1] − query_start_loc[n] tokens; its token i is at position
    p = context_lens[n] − q_len[n] + i. Its key and value are written into slot p % page of page
    block_tables[n, p // page], and it sees the keys of its sequence at positions j ≤ p, within the window:

        s_j = softmax_scale · q·k_j,   then softcap · tanh(s_j / softcap)
        lse = log(Σ_j exp s_j + Σ_x exp sinks_x),   o = Σ_j exp(s_j − lse) · v_j

    Prefill, chunks of a prefill and decode may be mixed in a step. Forward only: it has no derivative. If kv_pages is
    donated to a compiled program, the pool is updated in place, and bytes that belong to no token of the step are not
    touched; without donation XLA copies it.

    Args:
        q: the queries [T, H, D] of the step's tokens, one sequence after the other.
        k: their keys [T, G, D]; H is a multiple of G, and query head h uses head h // (H // G).
        v: their values [T, G, D]. q, k and v have one float dtype.
        kv_pages: the pool [P, page, 2G, D], keys at even and values at odd indices of the third axis, of that dtype.
        context_lens: [N] integers: the tokens of each sequence, those of the step included.
        block_tables: [N, pages of a sequence] integers: where the pages of a sequence are in the pool. Entries past its
            context may be anything. A page outside the pool is not written; it is read as the nearest one in it.
        query_start_loc: [N + 1] integers, ascending: sequence n has the tokens from entry n to entry n + 1.
        num_seqs: how many of the N sequences are in use, [1] integers or an int; the entries of the others, and tokens
            past query_start_loc[num_seqs], may hold anything.
        sinks: [H] or [H, n] float logits that join the denominator of every row, with no value.
        window: an int w, the w keys that end with the token's own, or a pair (left, right); causality makes right 0.
        softcap: bound of the logits.
        softmax_scale: D**-0.5 by default; a static number.
        return_lse: also return lse.

    Returns:
        (o [T, H, D] in q's dtype, the new kv_pages), or with return_lse (o, lse [T, H] float32, the new kv_pages).
        Tokens of no sequence, and those at a negative position, have o = 0 and lse = −∞, with sinks too.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        NotImplementedError: a derivative is asked for.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    PagedAttention, arXiv 2309.06180; Ragged Paged Attention, arXiv 2604.15464.
    """
    q, k, v, kv_pages = (array(NAME, n, x) for n, x in (("q", q), ("k", k), ("v", v), ("kv_pages", kv_pages)))
    tables = dict(context_lens=context_lens, block_tables=block_tables, query_start_loc=query_start_loc)
    tables = {name: array(NAME, name, x) for name, x in tables.items()}
    _check_arrays(q, k, v, kv_pages)
    check_tables(NAME, **tables)
    num_seqs = count_of_sequences(NAME, num_seqs, **tables)
    spec = cache_spec(NAME, q, window, softcap, softmax_scale)
    return_lse = static_bool(NAME, "return_lse", return_lse)
    operands = Operands(
        q[None],
        k[None],
        v[None],
        by_heads(NAME, kv_pages),
        **{name: int32(x)[None] for name, x in tables.items()},
        num_seqs=num_seqs,
        sinks=sinks_of_heads(NAME, sinks, q.shape[1], q),
    )
    named = align(primitives.forward, {name: x for name, x in operands._asdict().items() if x is not None})

    def finish(out: dict[str, Any]):
        pool = as_pool(out["new_pages"], kv_pages)
        return (out["o"][0], out["lse"][0], pool) if return_lse else (out["o"][0], pool)

    return Prepared(named, spec, finish)


def _check_arrays(q, k, v, kv_pages) -> None:
    shown = dict(q=q, k=k, v=v, kv_pages=kv_pages)
    require_rank(NAME, 3, "tokens, heads, features", q=q, k=k, v=v)
    require_rank(NAME, 4, "pages, slots of a page, keys and values of each head, features", kv_pages=kv_pages)
    require_dtype(NAME, np.floating, "a float type", **shown)
    require_same_dtype(NAME, **shown)
    (tokens, heads, features), groups = q.shape, k.shape[1]
    for name, x in shown.items():
        if 0 in x.shape[-2:] or (name == "kv_pages" and 0 in x.shape):
            raise value_error(NAME, f"{name} has the shape {x.shape}; only the number of tokens may be 0", **shown)
    if k.shape != (tokens, groups, features) or v.shape != k.shape:
        raise value_error(NAME, f"k and v must be [{tokens}, key/value heads, {features}], as q is", q=q, k=k, v=v)
    if heads % groups:
        rule = "query heads must be a multiple of key/value heads"
        raise value_error(NAME, f"k has {groups} heads but q has {heads}; {rule}", q=q, k=k)
    if kv_pages.shape[2:] != (2 * groups, features):
        rule = f"of each page [slots, {2 * groups}, {features}], a key and a value for each head of k"
        raise value_error(NAME, f"kv_pages must have {rule}", k=k, kv_pages=kv_pages)


class RaggedPageAttentionV3(Operation):
    """A step of serving over a paged cache: `ejkernel.lax.ragged_page_attention_v3` as a kernel object."""

    algorithm = primitives
    config_class = RaggedPageAttentionConfig
    prepare_arguments = staticmethod(ragged_page_attention_v3_arguments)
    renamed: ClassVar = RENAMED

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with four sequences that share 192 tokens and have four pages of 16 slots each."""
        array = jax.ShapeDtypeStruct
        q, kv, pages = (array(shape, jnp.bfloat16) for shape in ((192, 2, 128), (192, 1, 128), (16, 16, 2, 128)))
        tables = dict(context_lens=(4,), block_tables=(4, 4), query_start_loc=(5,), num_seqs=(1,))
        return dict(q=q, k=kv, v=kv, kv_pages=pages, **{name: array(of, jnp.int32) for name, of in tables.items()})

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Random arrays; sequences have equal shares of the tokens, and contexts of three quarters of their pages."""
        return synthetic_step(operands, operands["q"].shape[1], *operands["kv_pages"].shape[1:3])
