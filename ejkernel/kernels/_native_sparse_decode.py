"""What implementations of native_sparse_decode_attention share: the blocks that the queries select."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.primitives.native_sparse_decode_attention import NativeSparseDecodeAttentionSpec, Operands
from ejkernel.xla_utils.block_choice import chosen_blocks


def selected_blocks(x: Operands, spec: NativeSparseDecodeAttentionSpec) -> Array:
    """The lists of blocks [b,g,n] as they are given, or chosen by the weights of mean keys."""
    if x.block_indices is not None:
        return x.block_indices
    (b, h, d), groups = x.q.shape, x.k.shape[2]
    end = jnp.clip(x.sequence_end, 0, x.k.shape[1])[:, None]
    of_one = partial(
        chosen_blocks, count=x.ranks.shape[1], block_size=spec.block_size, softmax_scale=spec.softmax_scale
    )
    q = x.q.reshape(b, 1, groups, h // groups, d)
    return jax.vmap(of_one)(q, x.k_cmp, jnp.zeros_like(end), end)[:, 0].astype(jnp.int32)
