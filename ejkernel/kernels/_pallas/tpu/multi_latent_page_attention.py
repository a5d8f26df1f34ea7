"""multi_latent_page_attention on TPU: tiles of tokens over pages of latents; each slot is copied once for all heads.

A slot is the key of all heads and, without its rotary part, their value. So this is the kernel of ragged_page_attention
with one key/value head, where the rows of a tile are all heads of some tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.multi_latent_page_attention import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.multi_latent_page_attention import MultiLatentPageAttentionConfig

from ..._registry import configured_by, kernel_registry, supported_if
from . import _paged


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernel does not take the operands (arrays or shapes), or None."""
    if operands.indices is not None:
        return "indices: the kernel copies whole pages of consecutive keys, not keys by a list"
    q, pages, latent = _call(operands)
    return _paged.ragged_refusal(spec, target, operands, q, pages, latent)


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[MultiLatentPageAttentionConfig]:
    """The configs worth measuring, the most promising first."""
    return [
        MultiLatentPageAttentionConfig(*sizes, platform=Platform.PALLAS, backend=Backend.TPU)
        for sizes in _paged.ragged_sizes(spec, operands, *_call(operands))
    ]


@kernel_registry.register("multi_latent_page_attention", Platform.PALLAS, Backend.TPU, priority=100)
@configured_by(lambda *call: space(*call)[0], space, refuses=_paged.refuses)
@supported_if(supports)
def multi_latent_page_attention(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: MultiLatentPageAttentionConfig = MultiLatentPageAttentionConfig(),
) -> Outputs:
    """o and lse of the step's tokens."""
    from ._paged.ragged import ragged

    x = Operands(*operands)
    q, scales = jnp.concatenate([x.q_latent, x.q_rope], axis=-1), (x.k_scale, x.k_scale)
    return Outputs(*ragged(x, q, x.pages, scales, spec, config, "multi_latent_page_attention", x.q_latent.shape[3]))


def _call(x: Operands) -> tuple[Any, Any, int]:
    """The queries with their rotary parts as a shape, the pages, and the features of a latent."""
    q = jax.ShapeDtypeStruct((*x.q_latent.shape[:3], x.pages.shape[3]), x.q_latent.dtype)
    return q, x.pages, x.q_latent.shape[3]
