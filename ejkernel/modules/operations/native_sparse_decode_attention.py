"""native_sparse_decode_attention as an operation: from public arguments to operands and spec, and back."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Integer

from ...errors import value_error
from ...primitives.native_sparse_decode_attention import NativeSparseDecodeAttentionSpec
from ...primitives.native_sparse_decode_attention import native_sparse_decode_attention as primitives
from ...types import Window
from ...types.config import LARGEST_SIZE
from ...xla_utils.comparison import is_less
from .._operation import Operation, Prepared
from ._arguments import (
    align,
    array,
    int32,
    require_dtype,
    require_rank,
    size_of,
    static_bool,
    window_pair,
)
from ._native_sparse import block_size_of, check_heads, check_values, gates_of
from ._pages import check_cache, scale_of_logits

NAME = primitives.name


def native_sparse_decode_attention_arguments(
    q: Float[Array, "batch q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"],
    sequence_end: Integer[Array, " batch"],
    k_cmp: Float[Array, "batch kv_blocks kv_heads head_dim"] | None = None,
    v_cmp: Float[Array, "batch kv_blocks kv_heads v_head_dim"] | None = None,
    g_cmp: Float[Array, "batch q_heads"] | None = None,
    g_slc: Float[Array, "batch q_heads"] | None = None,
    g_swa: Float[Array, "batch q_heads"] | None = None,
    block_indices: Integer[Array, "batch kv_heads blocks"] | None = None,
    *,
    block_counts: int = 16,
    block_size: int = 64,
    window: Window | None = None,
    softmax_scale: float | None = None,
    return_block_indices: bool = False,
) -> Prepared[
    Float[Array, "batch q_heads v_head_dim"]
    | tuple[Float[Array, "batch q_heads v_head_dim"], Int32[Array, "batch kv_heads blocks"]]
]:
    """A step of decoding with native sparse attention: one query of each sequence over a cache with means of blocks.

        o = g_cmp · cmp + g_slc · slc + g_swa · swa

    The query of sequence n is at position i = sequence_end[n] − 1, and o is that row of `native_sparse_attention` on
    the first sequence_end[n] keys. What that computes of all keys, the means of blocks, is given here, so that a step
    reads block_counts · block_size + window keys and values, and a mean of each block:

    cmp: attention to k_cmp and v_cmp of the blocks that have ended, (x + 1) · block_size ≤ i + 1. It is left out where
        g_cmp is not given.
    slc: attention to the keys j ≤ i of the blocks in block_indices. Where these are not given they are those of
        `native_sparse_blocks`: the own block, the first, and the others of the highest weights of k_cmp.
    swa: attention to the last `window` keys. It is left out where no window is given; where g_swa is not given its gate
        is 1.

    The caller keeps the means: after keys and values of a token are written, the last block that has ended is

        x = sequence_end // block_size − 1,   k_cmp[x] = mean of k[x · block_size : (x + 1) · block_size]

    Forward only: it has no derivative. Keys, values and means that the query does not see may hold anything, even NaN.

    Args:
        q: one query of each sequence [B, H, D], of a float dtype.
        k: keys [B, K, G, D], in q's dtype; H is a multiple of G, and query head h uses head h // (H // G).
        v: values [B, K, G, V], in q's dtype.
        sequence_end: [B] integers, the number of keys of each sequence; values above K mean K. May be traced.
        k_cmp: the mean keys of blocks [B, C, G, D] with C ≥ K // block_size, of any float dtype: blocks are
            chosen by them as they are, and they are attended to in q's dtype. Needed to choose blocks, or with g_cmp.
        v_cmp: the mean values [B, C, G, V], with g_cmp only.
        g_cmp: gates [B, H] of the compressed branch, of any float dtype.
        g_slc: gates [B, H] of the selected branch, by default 1.
        g_swa: gates [B, H] of the window branch, with `window` only, by default 1.
        block_indices: [B, G, n] integers, the selected blocks, as in `native_sparse_attention`.
        block_counts: the number of blocks of a query if block_indices are not given.
        block_size: the number of tokens in a block.
        window: as in `native_sparse_attention`.
        softmax_scale: D**-0.5 by default; a static number.
        return_block_indices: also return the blocks.

    Returns:
        o [B, H, V] in q's dtype, with block_indices [B, G, n] int32 if asked for; o = 0 for sequences without keys.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        NotImplementedError: a derivative is asked for.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    Native sparse attention, arXiv 2502.11089.
    """
    arrays = {name: array(NAME, name, x) for name, x in dict(q=q, k=k, v=v, sequence_end=sequence_end).items()}
    given = dict(k_cmp=k_cmp, v_cmp=v_cmp, block_indices=block_indices)
    arrays |= {name: array(NAME, name, x) for name, x in given.items() if x is not None}
    counts = size_of(NAME, "block_counts", block_counts)
    _check(arrays, size_of(NAME, "block_size", block_size))
    size = block_size_of(NAME, block_size, arrays["k"])
    gates = gates_of(NAME, arrays["q"], g_cmp=g_cmp, g_slc=g_slc, g_swa=g_swa)
    window = None if window is None else _keys_of_window(window)
    _check_branches(arrays, gates, window)
    return_block_indices = static_bool(NAME, "return_block_indices", return_block_indices)
    scale = scale_of_logits(NAME, softmax_scale, arrays["q"])
    named = arrays | {name: int32(arrays[name]) for name in ("sequence_end", "block_indices") if name in arrays}
    named |= {name: x for name, x in gates.items() if x is not None}
    if "block_indices" not in named:
        named["ranks"] = jnp.arange(counts, dtype=jnp.int32)[None]

    def finish(out: Mapping[str, Any]):
        return (out["o"], out["blocks"]) if return_block_indices else out["o"]

    return Prepared(align(primitives.forward, named), NativeSparseDecodeAttentionSpec(size, scale, window), finish)


# --- Checks ----------------------------------------------------------------------------------------------------------


def _check(arrays: dict[str, Any], size: int) -> None:
    """Raises unless the arrays fit each other."""
    q, k, v, end = (arrays[name] for name in ("q", "k", "v", "sequence_end"))
    require_rank(NAME, 3, "batch, heads, features", q=q)
    check_heads(NAME, q=jax.ShapeDtypeStruct((q.shape[0], 1, *q.shape[1:]), q.dtype), k=k)
    check_cache(NAME, q, k=k, v=v)
    check_values(NAME, q, k, v)
    require_dtype(NAME, np.integer, "an integer type", sequence_end=end)
    if end.shape != q.shape[:1]:
        raise value_error(NAME, f"sequence_end must be [{q.shape[0]}], one number a sequence", q=q, sequence_end=end)
    for name, of in (("k_cmp", k), ("v_cmp", v)):
        if name in arrays:
            means, least = arrays[name], k.shape[1] // size
            require_dtype(NAME, np.floating, "a float type", **{name: means})
            if len(means.shape) != 4 or (means.shape[0], *means.shape[2:]) != (of.shape[0], *of.shape[2:]):
                rule = f"{name} must be {name[0]} with blocks for keys"
                raise value_error(NAME, rule, **{name[0]: of, name: means})
            if is_less(means.shape[1], least):
                rule = f"{name} has {means.shape[1]} means; {k.shape[1]} keys have {least} blocks of {size}"
                raise value_error(NAME, rule, k=k, **{name: means})
    if "block_indices" in arrays:
        blocks, wanted = arrays["block_indices"], (q.shape[0], k.shape[2])
        require_dtype(NAME, np.integer, "an integer type", block_indices=blocks)
        if len(blocks.shape) != 3 or blocks.shape[:2] != wanted:
            rule = f"block_indices must be {list(wanted)} and a list of blocks, of each sequence and key/value head"
            raise value_error(NAME, rule, q=q, k=k, block_indices=blocks)


def _check_branches(arrays: dict[str, Any], gates: dict[str, Any], window: Any) -> None:
    """Raises unless each branch has its arrays, and no array is without a branch."""
    has_cmp, chooses = gates["g_cmp"] is not None, "block_indices" not in arrays
    if window is None and gates["g_swa"] is not None:
        raise value_error(NAME, "g_swa is given without a window; it is the gate of that branch", g_swa=gates["g_swa"])
    if "k_cmp" not in arrays and (has_cmp or chooses):
        why = "the compressed branch attends to them" if has_cmp else "blocks are chosen by them; or give block_indices"
        raise value_error(NAME, f"k_cmp, the mean keys of blocks, is not given; {why}")
    if has_cmp != ("v_cmp" in arrays):
        raise value_error(NAME, "v_cmp and g_cmp are values and gate of the compressed branch: give both or neither")
    if "k_cmp" in arrays and not (has_cmp or chooses):
        rule = "k_cmp is given, but no branch reads it: block_indices are given, and g_cmp is not"
        raise value_error(NAME, rule, k_cmp=arrays["k_cmp"])


def _keys_of_window(window: Any) -> int:
    left, _ = window_pair(NAME, window)
    return LARGEST_SIZE if left is None else min(left + 1, LARGEST_SIZE)


class NativeSparseDecodeAttention(Operation):
    """A step of decoding with native sparse attention: `ejkernel.lax.native_sparse_decode_attention`."""

    algorithm = primitives
    prepare_arguments = staticmethod(native_sparse_decode_attention_arguments)
    renamed: ClassVar = {"window": "sliding_window"}

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call that chooses two of two blocks for each of three sequences."""
        array = jax.ShapeDtypeStruct
        q, kv = array((3, 4, 64), jnp.bfloat16), array((3, 128, 2, 64), jnp.bfloat16)
        means = array((3, 2, 2, 64), jnp.bfloat16)
        return dict(q=q, k=kv, v=kv, sequence_end=array((3,), jnp.int32), k_cmp=means, block_counts=2)

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Random arrays; each sequence has the first three quarters of its keys, and lists are of its last blocks."""
        values, (batch, length) = super().synthetic_operands(operands, spec), operands["k"].shape[:2]
        end = max(1, 3 * length // 4)
        values["sequence_end"] = jnp.full((batch,), end, jnp.int32)
        if (ranks := operands.get("ranks")) is not None:
            return values | {"ranks": jax.lax.broadcasted_iota(jnp.int32, ranks.shape, 1)}
        own = (end - 1) // spec.block_size
        lists = own - jax.lax.broadcasted_iota(jnp.int32, operands["block_indices"].shape, 2)
        return values | {"block_indices": jnp.maximum(lists, -1)}
