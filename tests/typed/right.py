"""Calls of the public API that a type checker takes."""

from typing import assert_type

import jax
import jax.numpy as jnp
from jax import Array

import ejkernel
from ejkernel import lax, modules, ops
from ejkernel.types import KernelConfig

q = k = v = jnp.zeros((2, 16, 4, 64))

o = lax.flash_attention(q, k, v, causal=True, window=8, softcap=30.0)
o, lse = lax.flash_attention(q, k, v, return_lse=True, config=KernelConfig(block_q=64))
lax.flash_attention(q, k, v, window=(8, None), sinks=jnp.zeros(4), config={"platform": "xla"})
lax.flash_attention(q=q, k=k, v=v, dropout_rate=0.1, dropout_key=jax.random.key(0))
modules.flash_attention(q, k, v, causal=True, sliding_window=8, platform="xla")

lengths, table = jnp.ones(2, jnp.int32), jnp.zeros((2, 4), jnp.int32)
lax.page_attention(q[:, 0], jnp.zeros((8, 16, 4, 64)), jnp.zeros((8, 16, 4, 64)), lengths, table, num_splits=2)
lax.gla(q, k, v, gk=-jnp.ones(q.shape), reverse=True)
lax.grouped_matmul(jnp.zeros((8, 4)), jnp.zeros((2, 4, 8)), lengths, preferred_element_type=jnp.bfloat16)
lax.mean_pooling(jnp.zeros((8, 4)), jnp.array([0, 3, 8]))
order, inverse = lax.ring_order(8, 2, "striped")
assert_type(lax.grouped_matmul(q[0, 0], k[0], lengths), Array)
modules.flash_attention(q, k, v, softmax_aux=jnp.zeros(4), dropout_prob=0.1, dropout_seed=3, cfg={"block_q": 64})
modules.flash_attention(q, k, v, mask_info=None, normalize_output=True)
modules.gla(q, k, v, g=-jnp.ones(q.shape), mesh=None, in_specs=None, out_specs=None)
modules.FlashAttention()(q, k, v, causal=True)
modules.detect_platform("gla")
modules.mean_pooling(jnp.zeros((8, 4)), jnp.array([0, 3, 8])).astype(jnp.bfloat16)

found: str = str(ejkernel.explain("flash_attention", q, k, v, causal=True, target="cuda"))
with ops.policy_override(autotune=False):
    jax.jit(lambda q: lax.flash_attention(q, q, q))(q)
