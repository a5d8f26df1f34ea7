"""flash_mla on TPU: XLA expands the latents, and the Pallas kernels of flash_attention attend."""

from ejkernel.kernels._flash_mla import Kernels, register
from ejkernel.types import Backend, Platform

from . import flash_attention


def kernels() -> Kernels:
    """The kernels of flash_attention, which are imported when they are first needed."""
    from .flash_attention import backward, configs, forward, tangent

    return Kernels(forward.flash_attention, tangent.flash_attention_jvp, backward.flash_attention_bwd, configs.space)


register(__name__, flash_attention, kernels, Platform.PALLAS, Backend.TPU, priority=100)
