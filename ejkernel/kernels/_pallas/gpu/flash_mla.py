"""flash_mla on Hopper GPUs: XLA expands the latents to keys and values, which the kernels of flash_attention take.

The forward takes the rotary parts of keys, which all heads share, as they are.

Few queries attend to the latents by the kernels of multi_latent_page_attention.
"""

from ejkernel.kernels import _absorbed_mla as absorbed
from ejkernel.kernels._flash_mla import Kernels, register
from ejkernel.types import Backend, Platform

from . import flash_attention, multi_latent_page_attention


def kernels() -> Kernels:
    """The kernels of flash_attention, which are imported when they are first needed."""
    from .flash_attention import backward, configs, forward, tangent

    takes_rope = lambda x, spec: forward.takes_rope(x.shapes(x.q.dtype), x.k_rope.shape[2], spec)
    return Kernels(
        forward.flash_attention, tangent.flash_attention_jvp, backward.flash_attention_bwd, configs.space, takes_rope
    )


register(
    __name__, flash_attention, kernels, Platform.PALLAS, Backend.GPU, priority=200, absorbs=absorbed.absorbs_in_kernels
)
absorbed.register(
    __name__,
    multi_latent_page_attention,
    lambda config: config.heads_per_block,
    Platform.PALLAS,
    Backend.GPU,
    priority=400,
)
