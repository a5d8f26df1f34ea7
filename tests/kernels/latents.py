"""Calls of flash_mla with NaN in unread entries, and a call of the sizes of a model."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.primitives.flash_attention import FlashAttentionSpec
from ejkernel.primitives.flash_mla import Operands
from tests.gpu.oracle import visible


def poisoned(call):
    """A call of `against_xla.prepared`, with NaN in latents, rotary parts and tangents that no query sees."""
    x, spec, tangents = call
    seen = np.asarray(visible(x.shapes(x.q.dtype), spec)).any((1, 2))[..., None]
    poison = lambda a: None if a is None else jnp.where(seen, a, jnp.nan)
    of = lambda x: x._replace(kv_latent=poison(x.kv_latent), k_rope=poison(x.k_rope))
    return of(x), spec, of(tangents)


def deepseek(batch=1, tokens=512, heads=4, dtype=jnp.bfloat16, **options) -> tuple[Operands, FlashAttentionSpec]:
    """The shapes of a causal layer of DeepSeek-V3: latents of 512, keys of 128 + 64 features and values of 128."""
    shapes = (batch, tokens, heads, 192), (batch, tokens, 512), (batch, tokens, 64), *((1, 512, heads, 128),) * 2
    x = Operands(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    return x, FlashAttentionSpec(causal=True, softmax_scale=192**-0.5, **options)
