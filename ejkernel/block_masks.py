"""Block masks for `ejkernel.lax.blocksparse_attention`, computed from the bounds of blocks.

    mask = block_masks.global_and_local(S, K, tokens=64, window=512) & block_masks.documents(ids, ids)
    o = ejkernel.lax.blocksparse_attention(q, k, v, mask, causal=True)

Each is bool [⌈S / block_q⌉, ⌈K / block_k⌉], some with leading batch and head axes, and keeps a block if the pattern has
any pair in it: which of the block's pairs are visible is decided by the options of the operation. Query i has the key
position i' = i + K − S. Other patterns are combinations of masks by `&` and `|`, or by `ejkernel.lax.block_mask_of`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from .errors import value_error
from .kernels._visibility import Visibility
from .modules.operations._arguments import (
    array,
    block_pair,
    int32,
    require_dtype,
    require_rank,
    static_int,
    window_pair,
)
from .types import Window
from .types.config import LARGEST_SIZE

BlockSize = tuple[int, int]
Mask = Bool[Array, "q_blocks kv_blocks"]


def causal(S: int, K: int, block_size: BlockSize = (128, 128)) -> Mask:
    """Keys up to the query's own position: j ≤ i'."""
    return _band("causal", S, K, None, 0, block_size)


def sliding_window(S: int, K: int, window: Window, block_size: BlockSize = (128, 128)) -> Mask:
    """Keys i' − left ≤ j ≤ i' + right; an int w is the w keys up to the query's own, (w − 1, 0)."""
    return _band("sliding_window", S, K, *window_pair("sliding_window", window), block_size)


def global_and_local(S: int, K: int, tokens: int, window: Window, block_size: BlockSize = (128, 128)) -> Mask:
    """A window, and global first tokens, which see all and are visible to all (Longformer, arXiv 2004.05150).

    The global ones are the keys j < tokens and the queries of these positions, 0 ≤ i' < tokens.
    """
    name = "global_and_local"
    tokens = static_int(name, "tokens", tokens)
    local = _band(name, S, K, *window_pair(name, window), block_size)
    (first, last), (first_key, _) = _bounds(name, S, K, block_size)
    has_global = jnp.maximum(first, 0) <= jnp.minimum(last, tokens - 1)
    return local | has_global[:, None] | (first_key < tokens)[None]


def strided(
    S: int, K: int, local: int, stride: int, heads: int | None = None, block_size: BlockSize = (128, 128)
) -> Mask | Bool[Array, "heads q_blocks kv_blocks"]:
    """The `local` blocks of keys up to the query's own, and every stride-th block of keys before these.

    A query's own block is i' // block_k. With `heads` each head has its own pattern, shifted by one block relative to
    the previous head: [heads, …]. Sparse transformers, arXiv 1904.10509; with heads Phi-3-small, 2404.14219.
    """
    name = "strided"
    local, stride = static_int(name, "local", local, 1), static_int(name, "stride", stride, 1)
    head = jnp.arange(1 if heads is None else static_int(name, "heads", heads, 1), dtype=jnp.int32)
    past, block_k = _band(name, S, K, None, 0, block_size), block_pair(name, block_size)[1]
    (first, _), (first_key, _) = _bounds(name, S, K, block_size)
    column = first_key // block_k
    is_local = first[:, None] // block_k - column[None] < local
    is_strided = (column[None] + head[:, None] + 1) % stride == 0
    kept = past[None] & (is_local[None] | is_strided[:, None])
    return kept if heads is not None else kept[0]


def documents(
    q_segment_ids: Integer[Array, "batch q_len"],
    kv_segment_ids: Integer[Array, "batch kv_len"],
    block_size: BlockSize = (128, 128),
) -> Bool[Array, "batch 1 q_blocks kv_blocks"]:
    """Blocks whose ranges of query and key ids overlap, in each batch element; negative ids are padding. May be traced.

    The mask is exact if both arrays number documents consecutively; else it may keep blocks without a pair.
    """
    name, ids = "documents", dict(q_segment_ids=q_segment_ids, kv_segment_ids=kv_segment_ids)
    ids = {of: array(name, of, x) for of, x in ids.items()}
    require_rank(name, 2, "batch, tokens", **ids)
    require_dtype(name, np.integer, "an integer type", **ids)
    q, kv = (int32(x) for x in ids.values())
    if q.shape[0] != kv.shape[0]:
        rule = "they must be equal"
        raise value_error(
            name, f"kv_segment_ids has batch {kv.shape[0]} but q_segment_ids has {q.shape[0]}; {rule}", **ids
        )
    lengths = q.shape[1], kv.shape[1]
    blocks = (min(block, max(1, n)) for block, n in zip(block_pair(name, block_size), lengths, strict=True))
    return Visibility(*lengths, None, None, segment_ids=(q, kv)).blocks(*blocks)[0][:, None]


def vertical_slash(
    S: int,
    K: int,
    vertical: Integer[Array, "*batch_and_heads columns"],
    slash: Integer[Array, "*batch_and_heads diagonals"],
    block_size: BlockSize = (128, 128),
) -> Bool[Array, "*batch_and_heads q_blocks kv_blocks"]:
    """The keys `vertical`, and the diagonals i' − j = `slash`, of each head (MInference, arXiv 2407.02490).

    Both may be traced; numbers out of range keep nothing. Memory grows with S + K and with the number of blocks.
    """
    name = "vertical_slash"
    queries, keys = _bounds(name, S, K, block_size)
    numbers = {of: array(name, of, x) for of, x in dict(vertical=vertical, slash=slash).items()}
    require_dtype(name, np.integer, "an integer type", **numbers)
    for of, x in numbers.items():
        if not x.ndim:
            raise value_error(name, f"{of} has no axes; its last axis must be that of the numbers of a head", **numbers)
    try:
        np.broadcast_shapes(*(x.shape[:-1] for x in numbers.values()))
    except ValueError:
        raise value_error(name, "vertical and slash must have the same batch and heads", **numbers) from None
    columns = _any_between(int32(numbers["vertical"]), 0, K, *keys)
    diagonals = _any_between(int32(numbers["slash"]), 1 - S, K, *_differences(queries, keys))
    return columns[..., None, :] | diagonals


def top_k(scores: Float[Array, "*batch_and_heads q_blocks kv_blocks"], k: int) -> Bool[Array, "*shape"]:
    """The k blocks of keys with the highest scores for each block of queries, except scores of −∞ and NaN.

    Of equal scores the earlier block comes first. May be traced.
    """
    name = "top_k"
    scores, k = array(name, "scores", scores), static_int(name, "k", k, 1)
    require_dtype(name, np.floating, "a float type", scores=scores)
    if scores.ndim < 2:
        rule = "it must have two at least, blocks of queries and of keys"
        raise value_error(name, f"scores has {scores.ndim} axes; {rule}", scores=scores)
    scores, k = jnp.where(jnp.isnan(scores), -jnp.inf, scores), min(k, scores.shape[-1])
    least = lax.top_k(scores, k)[0][..., -1:]
    above, equal = scores > least, scores == least
    first_equal = jnp.cumsum(equal, -1, dtype=jnp.int32) <= k - above.sum(-1, keepdims=True, dtype=jnp.int32)
    return (above | equal & first_equal) & (scores > -jnp.inf)


def _band(name: str, S: int, K: int, left: int | None, right: int | None, block_size: BlockSize) -> Mask:
    least, most = _differences(*_bounds(name, S, K, block_size))
    left, right = (LARGEST_SIZE if bound is None else min(bound, LARGEST_SIZE) for bound in (left, right))
    return (least <= left) & (most >= -right)


def _bounds(name: str, S: int, K: int, block_size: BlockSize) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The positions i' of the first and the last query of each block, and the first and the last key j of each."""
    S, K = static_int(name, "S", S), static_int(name, "K", K)
    sizes = zip((S, K), block_pair(name, block_size), strict=True)
    queries, keys = ((first := np.arange(0, n, block), np.minimum(first + block, n) - 1) for n, block in sizes)
    queries = (i + K - S for i in queries)
    return tuple(tuple(jnp.asarray(x, jnp.int32) for x in ends) for ends in (queries, keys))


def _differences(queries: tuple[Any, Any], keys: tuple[Any, Any]) -> tuple[Any, Any]:
    """The least and the greatest i' − j of the pairs in each block, which has all differences in between, too."""
    (first, last), (first_key, last_key) = queries, keys
    return first[:, None] - last_key[None], last[:, None] - first_key[None]


def _any_between(numbers: Array, begin: int, end: int, low: Any, high: Any) -> Bool[Array, "..."]:
    """Whether low ≤ x ≤ high for any x of numbers […, n]; begin ≤ low and high < end are arrays: […, *low's shape]."""

    def of_one(numbers):
        inside = (numbers >= begin) & (numbers < end)
        at = jnp.where(inside, numbers - begin, end - begin)
        there = jnp.zeros(end - begin, jnp.int32).at[at].set(1, mode="drop")
        before = jnp.pad(jnp.cumsum(there, dtype=jnp.int32), (1, 0))
        of = lambda x: before[x - begin]
        return of(high + 1) > of(low)

    for _ in numbers.shape[:-1]:
        of_one = jax.vmap(of_one)
    return of_one(numbers)
