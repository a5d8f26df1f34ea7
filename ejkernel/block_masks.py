"""Block masks for `ejkernel.lax.blocksparse_attention`, computed from the bounds of blocks.

    mask = block_masks.global_and_local(S, K, tokens=64, window=512) & block_masks.documents(ids, ids)
    o = ejkernel.lax.blocksparse_attention(q, k, v, mask, causal=True)

Each is bool [⌈S / block_q⌉, ⌈K / block_k⌉], some with leading batch and head axes, and keeps a block if the pattern has
any pair in it: which of the block's pairs are visible is decided by the options of the operation. Query i has the key
position i' = i + K − S. Other patterns are combinations of masks by `&` and `|`, or by `ejkernel.lax.block_mask_of`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from .errors import value_error
from .kernels._visibility import Visibility
from .modules.operations._arguments import block_pair, require_dtype, size_or_none, window_pair
from .types import Window

BlockSize = tuple[int, int]
Mask = Bool[Array, "q_blocks kv_blocks"]


def causal(S: int, K: int, block_size: BlockSize = (128, 128)) -> Mask:
    """Keys up to the query's own position: j ≤ i'."""
    return _band("causal", S, K, None, 0, block_size)


def sliding_window(S: int, K: int, window: Window, block_size: BlockSize = (128, 128)) -> Mask:
    """Keys i' − left ≤ j ≤ i' + right; an int w is the w keys up to the query's own, (w − 1, 0)."""
    return _band("sliding_window", S, K, *window_pair("sliding_window", window), block_size)


def global_and_local(S: int, K: int, tokens: int, window: Window, block_size: BlockSize = (128, 128)) -> Mask:
    """A window, and global first tokens, which see all and are visible to all (Longformer, arXiv 2004.05150)."""
    name = "global_and_local"
    tokens = size_or_none(name, "tokens", tokens, least=0)
    block_q, block_k = block_pair(name, block_size)
    local = _band(name, S, K, *window_pair(name, window), block_size)
    row, column = _numbers(*local.shape)
    is_global = (row[:, None] * block_q + K - S < tokens) | (column[None] * block_k < tokens)
    return local | is_global


def strided(
    S: int, K: int, local: int, stride: int, heads: int | None = None, block_size: BlockSize = (128, 128)
) -> Mask | Bool[Array, "heads q_blocks kv_blocks"]:
    """The `local` blocks up to the query's own, and every stride-th block of keys before these.

    With `heads` each head has its own pattern, shifted by one block relative to the previous head: [heads, …]. Sparse
    transformers, arXiv 1904.10509; with heads Phi-3-small, 2404.14219.
    """
    name = "strided"
    local, stride = size_or_none(name, "local", local), size_or_none(name, "stride", stride)
    block_q, block_k = block_pair(name, block_size)
    past = _band(name, S, K, None, 0, block_size)
    row, column = _numbers(*past.shape)
    own = ((row + 1) * block_q - 1 + K - S) // block_k  # the last block of keys visible to a block of queries
    behind = own[:, None] - column[None]
    head = jnp.arange(heads or 1, dtype=jnp.int32)[:, None, None]
    kept = past & ((behind < local) | ((column + head + 1) % stride == 0))
    return kept if heads is not None else kept[0]


def documents(
    q_segment_ids: Integer[Array, "batch q_len"],
    kv_segment_ids: Integer[Array, "batch kv_len"],
    block_size: BlockSize = (128, 128),
) -> Bool[Array, "batch 1 q_blocks kv_blocks"]:
    """Blocks whose ranges of query and key ids overlap, in each batch element; negative ids are padding. May be traced.

    The mask is exact if both arrays number documents consecutively; else it may keep blocks without a pair.
    """
    ids = dict(q_segment_ids=q_segment_ids, kv_segment_ids=kv_segment_ids)
    require_dtype("documents", jnp.integer, "an integer type", **ids)
    lengths = q_segment_ids.shape[1], kv_segment_ids.shape[1]
    visibility = Visibility(*lengths, None, None, segment_ids=(q_segment_ids, kv_segment_ids))
    return visibility.blocks(*_within(*lengths, "documents", block_size))[0][:, None]


def vertical_slash(
    S: int,
    K: int,
    vertical: Integer[Array, "*batch_and_heads columns"],
    slash: Integer[Array, "*batch_and_heads diagonals"],
    block_size: BlockSize = (128, 128),
) -> Bool[Array, "*batch_and_heads q_blocks kv_blocks"]:
    """The keys `vertical`, and the diagonals i' − j = `slash`, of each head (MInference, arXiv 2407.02490).

    Both may be traced; numbers out of range keep nothing.
    """
    block_q, block_k = _within(S, K, "vertical_slash", block_size)
    rows, columns = -(-S // block_q), -(-K // block_k)
    row, column = _numbers(rows, columns)
    of_vertical = ((vertical // block_k)[..., None] == column) & (vertical >= 0)[..., None] & (vertical < K)[..., None]
    # A diagonal crosses the keys from that of a block's first query up to that of its last one.
    first = (row * block_q + K - S) - slash[..., None]
    last = (jnp.minimum((row + 1) * block_q, S) - 1 + K - S) - slash[..., None]
    begin, end = jnp.clip(first // block_k, 0, columns), jnp.clip(last // block_k + 1, 0, columns)
    end = jnp.maximum(begin, jnp.where(first < K, end, begin))
    step = lambda at: jax.nn.one_hot(at, columns + 1, dtype=jnp.int32).sum(-3)  # over all diagonals
    crossing = jnp.cumsum(step(begin) - step(end), -1)[..., :columns] > 0
    return of_vertical.any(-2)[..., None, :] | crossing


def top_k(scores: Float[Array, "*batch_and_heads q_blocks kv_blocks"], k: int) -> Bool[Array, "*shape"]:
    """The k blocks of keys with the highest scores for each block of queries, except scores of −∞. May be traced."""
    k = size_or_none("top_k", "k", k)
    if not jnp.issubdtype(scores.dtype, jnp.floating) or scores.ndim < 2:
        raise value_error("top_k", "scores must be floats […, q_blocks, kv_blocks]", scores=scores)
    best, at = lax.top_k(scores, min(k, scores.shape[-1]))
    kept = jax.nn.one_hot(at, scores.shape[-1], dtype=bool) & (best > -jnp.inf)[..., None]
    return kept.any(-2)


def _band(name: str, S: int, K: int, left: int | None, right: int | None, block_size: BlockSize) -> Mask:
    return jnp.asarray(Visibility(S, K, left, right).blocks(*_within(S, K, name, block_size))[0][0])


def _within(S: int, K: int, name: str, block_size: BlockSize) -> BlockSize:
    """The block size, limited to the lengths."""
    block_q, block_k = block_pair(name, block_size)
    return min(block_q, max(1, S)), min(block_k, max(1, K))


def _numbers(rows: int, columns: int) -> tuple[Array, Array]:
    return jnp.arange(rows, dtype=jnp.int32), jnp.arange(columns, dtype=jnp.int32)
