"""flash_mla in Triton: XLA expands the latents, and the kernels of flash_attention attend.

Few queries attend to the latents by the kernels of multi_latent_page_attention.
"""

from ejkernel.kernels import _absorbed_mla as absorbed
from ejkernel.kernels._flash_mla import Kernels, register
from ejkernel.types import Backend, Platform

from . import flash_attention, multi_latent_page_attention

# On an H200 the kernels over latents do 210 TFLOP/s, products and kernels over expanded keys 600 and more.
SLOWER = 3.0


def kernels() -> Kernels:
    """Those of flash_attention, which are imported when they are first needed."""
    from .flash_attention import backward, configs, forward, tangent

    return Kernels(forward.flash_attention, tangent.flash_attention_jvp, backward.flash_attention_bwd, configs.space)


register(
    __name__, flash_attention, kernels, Platform.TRITON, Backend.GPU, priority=100, absorbs=absorbed.absorbs_in_kernels
)
absorbed.register(
    __name__,
    multi_latent_page_attention,
    lambda config: config.heads_per_block * config.queries_per_block,
    Platform.TRITON,
    Backend.GPU,
    priority=300,
    slower=SLOWER,
)
