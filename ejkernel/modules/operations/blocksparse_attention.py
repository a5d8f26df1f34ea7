"""blocksparse_attention as an operation: from the public arguments to the operands and spec of the primitive."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float, Integer

from ...errors import value_error
from ...primitives import flash_attention as flash
from ...primitives.blocksparse_attention import BlocksparseAttentionSpec
from ...primitives.blocksparse_attention import blocksparse_attention as algorithm
from ...types import BlockMask, CuSeqlens, DropoutKey, LogitsBias, LogitsMask, Scale, Sinks, Window
from .._operation import Prepared
from ._arguments import align, array, block_pair, require_dtype
from ._attention import attention_call, results_of
from .flash_attention import FlashAttention

NAME = algorithm.name


def blocksparse_attention_arguments(
    q: Float[Array, "batch q_len q_heads head_dim"] | Float[Array, "q_tokens q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"] | Float[Array, "kv_tokens kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"] | Float[Array, "kv_tokens kv_heads v_head_dim"],
    block_mask: BlockMask,
    bias: LogitsBias | None = None,
    mask: LogitsMask | None = None,
    q_segment_ids: Integer[Array, "batch q_len"] | None = None,
    kv_segment_ids: Integer[Array, "batch kv_len"] | None = None,
    sinks: Sinks | None = None,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    dropout_key: DropoutKey | None = None,
    *,
    block_size: tuple[int, int] = (128, 128),
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: Scale | None = None,
    dropout_rate: float = 0.0,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: Literal["e4m3"] | None = None,
) -> Prepared[
    Float[Array, "batch q_len q_heads v_head_dim"]
    | Float[Array, "q_tokens q_heads v_head_dim"]
    | tuple[Float[Array, "batch q_len q_heads v_head_dim"], Float[Array, "batch q_heads q_len"]]
    | tuple[Float[Array, "q_tokens q_heads v_head_dim"], Float[Array, "q_heads q_tokens"]]
]:
    """Softmax attention over the blocks of keys that a mask keeps for each block of queries.

    In each head, query i sees key j only if the mask keeps their blocks,

        block_mask[i // block_q, j // block_k],   (block_q, block_k) = block_size

    and causal, window, mask, segment ids and cu_seqlens allow it; everything else is as in `flash_attention`:

        s_ij = softmax_scale · q_i·k_j + bias_ij,   then softcap · tanh(s_ij / softcap),   then −∞ where masked
        lse_i = log(Σ_j exp s_ij + Σ_n exp sinks_n),   o_i = Σ_j exp(s_ij − lse_i) · keep_ij/(1 − dropout_rate) · v_j

    Time and memory grow with the number of blocks that are kept; no array has the size of the logits. Differentiable in
    q, k, v, bias, sinks and a traced softmax_scale, through o and lse, to any order. The time of derivatives of second
    and higher order also grows slightly with the number of all blocks, and over Auto axes of a mesh they gather q, k
    and v if the block mask differs between heads or batch elements.

    `block_mask_of` makes block masks from functions of i and j, and `ejkernel.block_masks` the usual ones.

    Args:
        q: queries [B, S, H, D], or [T, H, D] with cu_seqlens.
        k: keys [B, K, G, D], or [T', G, D]; H is a multiple of G.
        v: values [B, K, G, V], or [T', G, V]. q, k and v have one float dtype.
        block_mask: bool [⌈S / block_q⌉, ⌈K / block_k⌉], preceded by an axis of H or 1 heads if masks differ between
            heads, and by one of B or 1 batch elements before that; may be traced. With cu_seqlens its blocks are blocks
            of the packed tokens. If S or K is symbolic, tokens past the last block of the mask are not kept.
        bias: floats added to the scaled logits; broadcastable to [B, H, S, K] in every axis.
        mask: bool, broadcastable to [B, H, S, K]; False hides.
        q_segment_ids: [B, S] integers; query i sees key j only if their ids are equal and not negative.
        kv_segment_ids: [B, K] integers.
        sinks: [H] or [H, n] float logits that join the denominator of every row, with no value.
        cu_seqlens_q: [N + 1] integers, may be traced: sequence n is the tokens from entry n to entry n + 1.
        cu_seqlens_k: [N + 1] integers, likewise for keys and values.
        dropout_key: a `jax.random.key`; the dropped weights are those of `flash_attention` with that key.
        block_size: the numbers of queries and of keys in a block, which need not be the tile sizes of a kernel.
        causal: query i sees keys j ≤ i' = i + K − S.
        window: (left, right): keys i' − left ≤ j ≤ i' + right, None is unbounded; an int w is (w − 1, 0).
        softcap: bound of the logits, from 2**-60 to the largest finite number of their dtype.
        softmax_scale: D**-0.5 by default; a number, or a traced scalar.
        dropout_rate: the fraction of the weights that is dropped, in [0, 1).
        max_seqlen_q: static bound of the lengths in cu_seqlens_q.
        max_seqlen_k: static bound of the lengths in cu_seqlens_k.
        return_lse: also return lse.
        deterministic: only implementations that give the same bits in every run.
        batch_invariant: only implementations that give a row the same bits whatever else is in the batch.
        precision: "e4m3": as in `flash_attention`.

    Returns:
        o [B, S, H, V] in q's dtype, with lse [B, H, S] float32 if asked for; packed: [T, H, V] and [H, T]. A query
        without a kept block has o = 0 and lse = −∞ (with sinks, their logsumexp), and gradients 0.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    Sparse transformers, arXiv 1904.10509; FlashAttention, arXiv 2205.14135 (block-sparse); FlexAttention, 2412.05496.
    """
    attention, options = attention_call(
        NAME,
        flash.Operands(
            q,
            k,
            v,
            bias,
            mask,
            q_segment_ids,
            kv_segment_ids,
            sinks,
            softmax_scale,
            cu_seqlens_q,
            cu_seqlens_k,
            dropout_key,
        ),
        causal=causal,
        window=window,
        softcap=softcap,
        dropout_rate=dropout_rate,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        precision=precision,
    )
    block_size = block_pair(NAME, block_size)
    block_mask = _block_mask(block_mask, block_size, attention.q, attention.k)
    finish = results_of(NAME, attention, return_lse)
    named = attention._asdict() | {"block_mask": block_mask}
    named = align(algorithm.forward, {name: x for name, x in named.items() if x is not None})
    return Prepared(named, BlocksparseAttentionSpec(**options, block_size=block_size), finish)


def _block_mask(block_mask, block_size, q, k):
    """The block mask [b?,h?,x,y]; the sizes x and y are checked if the lengths are static."""
    block_mask = array(NAME, "block_mask", block_mask)
    require_dtype(NAME, np.bool_, "bool", block_mask=block_mask)
    shown, rank = dict(block_mask=block_mask, q=q, k=k), len(block_mask.shape)
    if rank not in (2, 3, 4):
        rule = "it must have 2 to 4: batch, heads, blocks of queries, blocks of keys"
        raise value_error(NAME, f"block_mask has {rank} axes; {rule}", **shown)
    b, h, rows, columns = (1,) * (4 - rank) + block_mask.shape
    for of, found, wanted in (("batch", b, q.shape[0]), ("heads", h, q.shape[2])):
        if found not in (1, wanted):
            raise value_error(NAME, f"block_mask has {of} {found} but q has {wanted}; it must be that or 1", **shown)
    of_lengths = (("queries", rows, q.shape[1]), ("keys", columns, k.shape[1]))
    for (of, found, length), block in zip(of_lengths, block_size, strict=True):
        if not is_symbolic_dim(length) and found != -(-length // block):
            rule = f"{length} {of} in blocks of {block} are {-(-length // block)}"
            raise value_error(NAME, f"block_mask has {found} blocks of {of}; {rule}", **shown)
    return block_mask.reshape(b, h, rows, columns)


class BlocksparseAttention(FlashAttention):
    """Softmax attention over the kept blocks: `ejkernel.lax.blocksparse_attention` as a kernel object."""

    algorithm = algorithm
    prepare_arguments = staticmethod(blocksparse_attention_arguments)

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with two blocks of queries and two of keys."""
        x, kv = (jax.ShapeDtypeStruct((1, 256, heads, 128), jnp.bfloat16) for heads in (2, 1))
        return dict(q=x, k=kv, v=kv, block_mask=jax.ShapeDtypeStruct((2, 2), jnp.bool_), causal=True, return_lse=True)

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Those of flash_attention, with a mask of the blocks at the diagonal and a random quarter of the others."""
        values, of = super().synthetic_operands(operands, spec), operands["block_mask"]
        (rows, columns), kept = of.shape[2:], jax.random.bernoulli(jax.random.key(0), 0.25, of.shape)
        at = jnp.arange(rows, dtype=jnp.int32) * columns // max(1, rows)
        return values | {"block_mask": kept | (at[:, None] == jnp.arange(columns, dtype=jnp.int32)[None])}

    @classmethod
    def flops(cls, named: Mapping[str, Any], results: Sequence[str], spec: Any) -> float | None:
        """None, since the values of the mask decide which blocks are computed."""
        return None
