"""Calls of the public API in which a type checker finds the mistake, on each line that says so."""

import jax.numpy as jnp

from ejkernel import lax, modules, ops

q = k = v = jnp.zeros((2, 16, 4, 64))

lax.flash_attention(q, k)  # wrong: v is missing
lax.flash_attention(q, k, v, casual=True)  # wrong: no such option
lax.flash_attention(q, k, v, causal="yes")  # wrong: a bool
lax.flash_attention(q, k, v, window="8")  # wrong: a number, or a pair
lax.flash_attention(q, k, v, softcap="30")  # wrong: a number
lax.flash_attention(q, k, "v")  # wrong: an array
lax.flash_attention(q, k, v, config=64)  # wrong: a config
lax.flash_attention(q, k, v, casual=True, config={"block_q": 64})  # wrong: no such option
modules.gla(q, k, v, q).lse  # wrong: an array, or two
modules.flash_attn(q, k, v)  # wrong: no such function
lax.ring_order(8, 2, "spiral")  # wrong: no such layout
lax.flash_atention(q, k, v)  # wrong: no such operation
lax.mean_pooling(jnp.zeros((8, 4)), chunk=64)  # wrong: chunk_size
ops.policy_override(autotune="no")  # wrong: a bool
modules.flash_attention(q, k, v, window=8)  # wrong: sliding_window
modules.flash_attention(q, k, v, casual=True)  # wrong: no such option
modules.flash_attention(q, k, v, sliding_window="8")  # wrong: a number, or a pair
modules.gla(q, k, v)  # wrong: g is missing
modules.gla(q, k, v, gk=q)  # wrong: g
modules.grouped_matmul(q, k, v, platform=3)  # wrong: a name
modules.page_attention(q, k, v, softmax_scale=0.5)  # wrong: context_lens and block_tables are missing
modules.unified_attention(q, k, v)  # wrong: lengths and tables are missing
