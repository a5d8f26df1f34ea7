"""native_sparse_blocks as an operation: from the public arguments to the operands and spec of the primitive."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from ...primitives.native_sparse_blocks import NativeSparseBlocksSpec
from ...primitives.native_sparse_blocks import native_sparse_blocks as primitives
from ...types import CuSeqlens
from .._operation import Operation, Prepared
from ._arguments import align, array, size_of
from ._native_sparse import block_size_of, check_heads, cuts_of
from ._pages import scale_of_logits

NAME = primitives.name


def native_sparse_blocks_arguments(
    q: Float[Array, "batch q_len q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    cu_seqlens: CuSeqlens | None = None,
    *,
    block_counts: int = 16,
    block_size: int = 64,
    softmax_scale: float | None = None,
) -> Prepared[Int32[Array, "batch q_len kv_heads block_counts"]]:
    """The blocks of keys that each query attends to in native sparse attention: its own, the first, and the best.

    With c_x the mean key of block x, the keys from x · block_size on, query i of head h has weights for the blocks that
    end at or before it, which are summed over the heads that share keys; i' = i + K − S:

        p_ihx = exp(softmax_scale · q_ih·c_x) / Σ_x' exp(softmax_scale · q_ih·c_x'),   (x + 1) · block_size ≤ i' + 1
        score_ix = Σ_h p_ihx

    A list has the query's own block, i' // block_size, then block 0, then the blocks of the highest scores in between,
    of equal scores the earlier first. Scores are computed in float32 for some queries at a time, so that those of all
    queries are never in memory together. It has no derivative. `native_sparse_attention` takes the lists, and makes
    them itself if it is given none.

    Args:
        q: queries [B, S, H, D], of a float dtype.
        k: keys [B, K, G, D], in q's dtype; H is a multiple of G, and query head h uses head h // (H // G).
        cu_seqlens: [N + 1] integers that divide the tokens, of a batch of 1 and S = K, into sequences: blocks are then
            numbered within each. May be traced.
        block_counts: the number of blocks in a list.
        block_size: the number of keys in a block.
        softmax_scale: D**-0.5 by default; a static number.

    Returns:
        block_indices int32 [B, S, G, block_counts] for each query and key/value head, filled up with −1 if there are
        fewer blocks up to the query; all −1 for tokens of no sequence.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        NotImplementedError: a derivative is asked for.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    Native sparse attention, arXiv 2502.11089.
    """
    q, k = array(NAME, "q", q), array(NAME, "k", k)
    check_heads(NAME, q=q, k=k)
    named = dict(q=q, k=k, ranks=jnp.arange(size_of(NAME, "block_counts", block_counts), dtype=jnp.int32)[None])
    if (cuts := cuts_of(NAME, cu_seqlens, q, k)) is not None:
        named["cu_seqlens"] = cuts
    scale = scale_of_logits(NAME, softmax_scale, q)
    spec = NativeSparseBlocksSpec(block_size_of(NAME, block_size, k), scale)
    return Prepared(align(primitives.forward, named), spec, lambda out: out["block_indices"])


class NativeSparseBlocks(Operation):
    """The choice of blocks of native sparse attention: `ejkernel.lax.native_sparse_blocks` as a kernel object."""

    algorithm = primitives
    prepare_arguments = staticmethod(native_sparse_blocks_arguments)
    renamed: ClassVar = {"cu_seqlens": "cum_seqlens"}

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call that chooses two of four blocks for each query."""
        q, k = (jax.ShapeDtypeStruct((1, 256, heads, 64), jnp.bfloat16) for heads in (4, 2))
        return dict(q=q, k=k, block_counts=2)

    @classmethod
    def synthetic_operands(cls, operands: Any, spec: Any) -> dict[str, Any]:
        """Random arrays; uneven sequences."""
        values = super().synthetic_operands(operands, spec)
        values["ranks"] = jax.lax.broadcasted_iota(jnp.int32, operands["ranks"].shape, 1)
        if (cuts := operands.get("cu_seqlens")) is not None:
            values["cu_seqlens"] = uneven_cuts(operands["q"].shape[1], cuts)
        return values


def uneven_cuts(tokens: int, cuts: Any) -> jax.Array:
    """cu_seqlens of sequences of uneven lengths, of the shape of `cuts`."""
    ends = np.round(tokens * np.linspace(0, 1, cuts.shape[1]) ** 1.5)
    return jnp.broadcast_to(jnp.asarray(ends, jnp.int32), cuts.shape)
