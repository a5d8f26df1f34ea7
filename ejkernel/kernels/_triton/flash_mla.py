"""flash_mla in Triton: XLA expands the latents, and the kernels of flash_attention attend."""

from ejkernel.kernels._flash_mla import Kernels, register
from ejkernel.types import Backend, Platform

from . import flash_attention


def kernels() -> Kernels:
    """Those of flash_attention, which are imported when they are first needed."""
    from .flash_attention import backward, configs, forward, tangent

    return Kernels(forward.flash_attention, tangent.flash_attention_jvp, backward.flash_attention_bwd, configs.space)


register(__name__, flash_attention, kernels, Platform.TRITON, Backend.GPU, priority=100)
