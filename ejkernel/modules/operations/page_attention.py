"""page_attention as an operation: from the public arguments to the operands and spec of the primitive, and back."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Int32, Integer

from ...errors import value_error
from ...primitives.page_attention import Operands
from ...primitives.page_attention import page_attention as primitives
from ...types import Sinks, Window
from ...types.page_attention import PageAttentionConfig
from .._operation import Operation, Prepared
from ._arguments import align, array, int32, require_known, require_rank, static_bool
from ._attention import sinks_of_heads
from ._pages import (
    RENAMED,
    PageScale,
    cache_spec,
    check_cache,
    check_heads,
    check_tables,
    plan_of_step,
    scale_of_pages,
    synthetic_step,
)

NAME = primitives.name


def page_attention_arguments(
    q: Float[Array, "sequences q_heads head_dim"],
    k_pages: Float[Array, "pages page_size kv_heads head_dim"] | Int8[Array, "pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "pages page_size kv_heads v_head_dim"] | Int8[Array, "pages page_size kv_heads v_head_dim"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    sinks: Sinks | None = None,
    k_scale: PageScale | None = None,
    v_scale: PageScale | None = None,
    plan: Int32[Array, "sequences items 8"] | None = None,
    *,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Prepared[
    Float[Array, "sequences q_heads v_head_dim"]
    | tuple[Float[Array, "sequences q_heads v_head_dim"], Float[Array, "sequences q_heads"]]
]:
    """A step of decoding over a paged cache: one query of each sequence attends over the sequence's keys and values.

    The query of sequence n is its newest token, at position context_lens[n] − 1, whose key and value are already in the
    cache. Key j is in slot j % page of page block_tables[n, j // page]. The query sees 0 ≤ j < context_lens[n], within
    the window:

        s_j = softmax_scale · q·k_j,   then softcap · tanh(s_j / softcap)
        lse = log(Σ_j exp s_j + Σ_x exp sinks_x),   o = Σ_j exp(s_j − lse) · v_j

    Forward only: it has no derivative. Slots past a context may hold anything, even NaN.

    Args:
        q: one query of each sequence [N, H, D], of a float dtype.
        k_pages: the pool of keys [P, page, G, D], in q's dtype, float8_e4m3fn or int8; H is a multiple of G, and query
            head h uses head h // (H // G).
        v_pages: the pool of values [P, page, G, V], in the dtype of k_pages.
        context_lens: [N] integers: how many keys each sequence has, its newest token's included. A sequence of 0 has
            o = 0 and lse = −∞, with sinks too: it has no query.
        block_tables: [N, pages of a sequence] integers: where the pages of a sequence are in the pool. Entries past its
            context may be anything. A page outside the pool is read as the nearest one in it.
        sinks: [H] or [H, n] float logits that join the denominator of every row, with no value.
        k_scale: a float factor of the keys: a scalar, [G], or [P, page, G] for each slot and head.
        v_scale: a factor of the values, likewise.
        plan: a work list for the programs of a GPU, by `page_plan` of these lengths and this window, once for all
            layers of a step. Results are the same without it; with batch_invariant it is not used.
        window: an int w, the w keys that end with the query's own, or a pair (left, right), where right has no effect.
        softcap: bound of the logits.
        softmax_scale: D**-0.5 by default; a static number.
        num_splits: the number of parts of a sequence's keys that are computed in parallel, if the implementation is not
            to choose it; at most the number of pages. It changes only the rounding.
        return_lse: also return lse.
        batch_invariant: only implementations that give a sequence the same bits whatever else is in the step.

    Returns:
        o [N, H, V] in q's dtype; with return_lse (o, lse [N, H] float32).

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        NotImplementedError: a derivative is asked for.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    PagedAttention, arXiv 2309.06180; Flash-Decoding, 2023, the blog of PyTorch; sinks, arXiv 2309.17453.
    """
    q, k_pages, v_pages, context_lens, block_tables = (
        array(NAME, name, x)
        for name, x in dict(
            q=q, k_pages=k_pages, v_pages=v_pages, context_lens=context_lens, block_tables=block_tables
        ).items()
    )
    _check_arrays(q, k_pages, v_pages)
    check_tables(NAME, context_lens, block_tables)
    if context_lens.shape[0] != q.shape[0]:
        rule = f"context_lens has {context_lens.shape[0]} sequences but q has {q.shape[0]}; they must be equal"
        raise value_error(NAME, rule, q=q, context_lens=context_lens)
    groups = k_pages.shape[2]
    operands = Operands(
        q[None],
        k_pages[None],
        v_pages[None],
        int32(context_lens)[None],
        int32(block_tables)[None],
        sinks_of_heads(NAME, sinks, q.shape[1], q),
        scale_of_pages(NAME, "k_scale", k_scale, k_pages, groups, q),
        scale_of_pages(NAME, "v_scale", v_scale, v_pages, groups, q),
        plan_of_step(NAME, plan, q.shape[0], q.shape[0]),
    )
    spec = cache_spec(
        NAME, q, window, softcap, softmax_scale, num_splits, block_tables.shape[1], batch_invariant=batch_invariant
    )
    return_lse = static_bool(NAME, "return_lse", return_lse)
    named = align(primitives.forward, {name: x for name, x in operands._asdict().items() if x is not None})
    return Prepared(named, spec, lambda out: (out["o"][0], out["lse"][0]) if return_lse else out["o"][0])


def _check_arrays(q, k_pages, v_pages) -> None:
    pages = dict(k_pages=k_pages, v_pages=v_pages)
    require_rank(NAME, 3, "sequences, heads, features", q=q)
    require_rank(NAME, 4, "pages, slots of a page, heads, features", **pages)
    require_known(NAME, "the number of slots of a page", k_pages.shape[1], **pages)
    check_cache(NAME, q, **pages)
    check_heads(NAME, q, "k_pages", k_pages, groups=k_pages.shape[2], features=k_pages.shape[3])
    if v_pages.shape[:3] != k_pages.shape[:3]:
        raise value_error(NAME, f"v_pages must be {list(k_pages.shape[:3])} of features, as k_pages is", **pages)


class PageAttention(Operation):
    """A step of decoding over a paged cache: `ejkernel.lax.page_attention` as a kernel object."""

    algorithm = primitives
    config_class = PageAttentionConfig
    prepare_arguments = staticmethod(page_attention_arguments)
    renamed: ClassVar = RENAMED

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with four sequences of up to 64 tokens in pages of 16 slots."""
        array = jax.ShapeDtypeStruct
        pages = array((16, 16, 2, 128), jnp.bfloat16)
        tables = dict(context_lens=array((4,), jnp.int32), block_tables=array((4, 4), jnp.int32))
        return dict(q=array((4, 4, 128), jnp.bfloat16), k_pages=pages, v_pages=pages, **tables)

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Random arrays; contexts of three quarters of the pages in the block tables."""
        return synthetic_step(operands, operands["q"].shape[1], *operands["k_pages"].shape[1:3])
