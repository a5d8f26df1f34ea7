"""ragged_page_attention_v3_turboquant as an operation: from public arguments to operands and spec, and back."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, UInt8

from ...errors import value_error
from ...primitives.ragged_page_attention_v3_turboquant import Operands
from ...primitives.ragged_page_attention_v3_turboquant import ragged_page_attention_v3_turboquant as primitives
from ...types import Sinks, Window
from ...types.ragged_page_attention_v3 import RaggedPageAttentionConfig
from .._operation import Operation, Prepared
from ._arguments import align, array, require_rank, require_same_dtype, static_bool
from ._pages import RENAMED, cache_spec, synthetic_step
from ._turboquant import example_of_cache, operands_of_cache

NAME = primitives.name


def ragged_page_attention_v3_turboquant_arguments(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    key_indices_pages: UInt8[Array, "pages page_size kv_heads index_bytes"],
    key_signs_pages: UInt8[Array, "pages page_size kv_heads sign_bytes"],
    key_norms_pages: Float[Array, "pages page_size kv_heads 2"],
    value_indices_pages: UInt8[Array, "pages page_size kv_heads index_bytes"],
    value_norms_pages: Float[Array, "pages page_size kv_heads"],
    context_lens: Integer[Array, " sequences"],
    block_tables: Integer[Array, "sequences pages_per_seq"],
    query_start_loc: Integer[Array, " sequences+1"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    rotation_matrix: Float[Array, "head_dim head_dim"],
    qjl_projection: Float[Array, "qjl_dim head_dim"],
    key_codebook: Float[Array, " key_entries"],
    value_codebook: Float[Array, " value_entries"],
    sinks: Sinks | None = None,
    *,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> Prepared[
    tuple[
        Float[Array, "tokens q_heads head_dim"],
        UInt8[Array, "pages page_size kv_heads index_bytes"],
        UInt8[Array, "pages page_size kv_heads sign_bytes"],
        Float[Array, "pages page_size kv_heads 2"],
        UInt8[Array, "pages page_size kv_heads index_bytes"],
        Float[Array, "pages page_size kv_heads"],
    ]
    | tuple[
        Float[Array, "tokens q_heads head_dim"],
        Float[Array, "tokens q_heads"],
        UInt8[Array, "pages page_size kv_heads index_bytes"],
        UInt8[Array, "pages page_size kv_heads sign_bytes"],
        Float[Array, "pages page_size kv_heads 2"],
        UInt8[Array, "pages page_size kv_heads index_bytes"],
        Float[Array, "pages page_size kv_heads"],
    ]
]:
    """A step of serving that writes its keys and values into a cache quantised by TurboQuant, and attends over it.

    With the rotation Π and the projection S of e rows, a key k is stored as the codebook entries c nearest to
    Π·k / ‖k‖, the signs s = sign(S·r) of the residual r = Π·k / ‖k‖ − c, and the norms ‖k‖ and ‖r‖; a value v as its
    entries c and ‖v‖. These are dequantised to

        k̃ = ‖k‖ · Πᵀ(c + √(π/2e) · ‖r‖ · Sᵀs),   ṽ = ‖v‖ · Πᵀc

    and ⟨q, k̃⟩ is ⟨q, k⟩ on average over S. In the step sequence n has q_len[n] = query_start_loc[n + 1] −
    query_start_loc[n] tokens; its token i stands at position p = context_lens[n] − q_len[n] + i. Its key and value
    are written into slot p % page of page block_tables[n, p // page], and it sees the keys of its sequence at positions
    j ≤ p within the window, all of them quantised, its own too:

        s_j = softmax_scale · q·k̃_j,   then softcap · tanh(s_j / softcap)
        lse = log(Σ_j exp s_j + Σ_x exp sinks_x),   o = Σ_j exp(s_j − lse) · ṽ_j

    Prefill, chunks of a prefill and decode may be mixed in a step. Forward only: it has no derivative. If the pools are
    donated to a compiled program, they are updated in place, and bytes that belong to no token of the step are not
    touched; without donation XLA copies them. On GPUs k̃ and ṽ are rounded to 16 bits for queries of 16 bits: to q's
    dtype where a sequence has many tokens.

    Args:
        q: the queries [T, H, D] of the step's tokens, one sequence after the other; D is even.
        k: their keys [T, G, D]; H is a multiple of G, and query head h uses head h // (H // G).
        v: their values [T, G, D]. q, k and v have one float dtype.
        key_indices_pages: the pool [P, page, G, D/2] uint8, two indices in a byte, the first in its low half. An index
            past the end of the codebook is its last one.
        key_signs_pages: the pool [P, page, G, e/8] uint8, eight signs in a byte, the first in its lowest bit; 1 is +1.
        key_norms_pages: the pool [P, page, G, 2], ‖k‖ and ‖r‖, of a float dtype.
        value_indices_pages: the pool [P, page, G, D/2] uint8.
        value_norms_pages: the pool [P, page, G], ‖v‖, of a float dtype.
        context_lens: [N] integers: the tokens of each sequence, those of the step included.
        block_tables: [N, pages of a sequence] integers: where the pages of a sequence are in the pools. Entries past
            its context may be anything. A page outside the pools is not written; it is read as the nearest one in them.
        query_start_loc: [N + 1] integers, ascending: sequence n has the tokens from entry n to entry n + 1.
        num_seqs: how many of the N sequences are in use, [1] integers or an int; the entries of the others, and tokens
            past query_start_loc[num_seqs], may hold anything.
        rotation_matrix: Π [D, D], orthogonal: `ejkernel.quantization.turboquant.matrices` makes one.
        qjl_projection: S [e, D] of normal numbers of variance 1 / e; e is a multiple of 8.
        key_codebook: up to 16 float entries for keys: 2^(b − 1) for b bits a feature, as one bit is the sign;
            `ejkernel.quantization.turboquant.codebook` computes them.
        value_codebook: up to 16 float entries for values: 2^b for b bits a feature.
        sinks: [H] or [H, n] float logits that join the denominator of every row, with no value.
        window: an int w, the w keys that end with the token's own, or a pair (left, right); causality makes right 0.
        softcap: bound of the logits.
        softmax_scale: D**-0.5 by default; a static number.
        return_lse: also return lse.

    Returns:
        (o [T, H, D] in q's dtype, *pools), or with return_lse (o, lse [T, H] float32, *pools): the five new pools in
        the order of the arguments. Tokens of no sequence, and those at a negative position, have o = 0 and lse = −∞,
        with sinks too.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        NotImplementedError: a derivative is asked for.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    TurboQuant, arXiv 2504.19874; QJL, arXiv 2406.03482; PagedAttention, arXiv 2309.06180.
    """
    q, k, v = (array(NAME, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    require_rank(NAME, 3, "tokens, heads, features", q=q, k=k, v=v)
    require_same_dtype(NAME, q=q, k=k, v=v)
    pools = dict(
        key_indices_pages=key_indices_pages,
        key_signs_pages=key_signs_pages,
        key_norms_pages=key_norms_pages,
        value_indices_pages=value_indices_pages,
        value_norms_pages=value_norms_pages,
    )
    tables = dict(context_lens=context_lens, block_tables=block_tables, query_start_loc=query_start_loc)
    matrices = dict(
        rotation_matrix=rotation_matrix,
        qjl_projection=qjl_projection,
        key_codebook=key_codebook,
        value_codebook=value_codebook,
    )
    cache = operands_of_cache(NAME, q, pools, tables, num_seqs, matrices, sinks)
    wanted = (q.shape[0], cache["value_norms_pages"].shape[3], q.shape[2])
    if k.shape != wanted or v.shape != wanted:
        raise value_error(NAME, f"k and v must be {list(wanted)}, with the tokens of q", q=q, k=k, v=v, **pools)
    operands = Operands(q[None], k[None], v[None], **cache)
    spec = cache_spec(NAME, q, window, softcap, softmax_scale)
    return_lse = static_bool(NAME, "return_lse", return_lse)
    named = align(primitives.forward, {name: x for name, x in operands._asdict().items() if x is not None})
    kept = ("o", *(["lse"] if return_lse else ()), *(f"new_{name}" for name in pools))
    return Prepared(named, spec, lambda out: tuple(out[name][0] for name in kept))


class RaggedPageAttentionV3TurboQuant(Operation):
    """A step over a quantised cache: `ejkernel.lax.ragged_page_attention_v3_turboquant` as a kernel object."""

    algorithm = primitives
    config_class = RaggedPageAttentionConfig
    prepare_arguments = staticmethod(ragged_page_attention_v3_turboquant_arguments)
    renamed: ClassVar = RENAMED

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with four sequences that share 192 tokens, a page of 128 slots each, and four bits per feature."""
        q, kv = (jax.ShapeDtypeStruct((192, heads, 128), jnp.bfloat16) for heads in (2, 1))
        return dict(q=q, k=kv, v=kv, **example_of_cache(heads=1, features=128))

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Random arrays; sequences have equal shares of the tokens, and contexts of three quarters of their pages."""
        return synthetic_step(operands, operands["q"].shape[1], *operands["value_norms_pages"].shape[1:3])
