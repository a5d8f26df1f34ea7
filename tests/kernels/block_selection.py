"""Calls of native_sparse_blocks whose lists kernels are compared by."""

import jax
import jax.numpy as jnp

from ejkernel.primitives.native_sparse_blocks import NativeSparseBlocksSpec, Operands

CALLS = {
    "square": dict(b=2, s=150, t=150),
    "few queries": dict(s=9, t=150),
    "more queries than keys": dict(s=70, t=40),
    "packed": dict(b=2, s=150, t=150, cuts=(0, 3, 3, 70, 101, 150)),
    "a part is packed": dict(s=150, t=150, cuts=(20, 61, 140)),
    "one list for all, longer than the blocks": dict(s=60, t=60, h=3, g=1, n=12),
    "blocks of seven": dict(s=60, t=60, d=24, size=7),
    "its own block alone": dict(s=60, t=60, n=1),
    "its own block and the first": dict(s=60, t=60, n=2),
}


def operands(dtype, b=1, s=150, t=150, h=4, g=2, d=16, n=6, size=8, cuts=None):
    normal = lambda key, *shape: jax.random.normal(jax.random.key(key), shape, jnp.float32).astype(dtype)
    cuts = None if cuts is None else jnp.asarray([cuts], jnp.int32)
    x = Operands(normal(0, b, s, h, d), normal(1, b, t, g, d), jnp.arange(n, dtype=jnp.int32)[None], cuts)
    return x, NativeSparseBlocksSpec(block_size=size, softmax_scale=d**-0.5)
