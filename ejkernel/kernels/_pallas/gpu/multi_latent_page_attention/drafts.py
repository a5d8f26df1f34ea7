"""Drafts, of which a mask says who sees them: few keys, which are left to Triton's kernel.

It continues the softmax of the cached keys, which all tokens of a sequence see as far as their window.
"""

from dataclasses import replace

from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._triton import multi_latent_page_attention as of_triton
from ejkernel.kernels._triton.multi_latent_page_attention.kernel import multi_latent_page_attention
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.multi_latent_page_attention import Operands, Outputs


def with_drafts(of_cached: Outputs, x: Operands, spec: CacheSpec) -> Outputs:
    """The outputs of all keys and sinks, from those without the drafts."""
    x, spec = x._replace(sinks=None), replace(spec, num_splits=None)
    config = replace(of_triton.space(spec, x, gpu_target())[0], num_splits=1)
    return multi_latent_page_attention(x, spec, config, of_cached)
