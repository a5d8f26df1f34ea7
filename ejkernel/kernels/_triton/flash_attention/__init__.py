"""flash_attention in Triton: the portable GPU tier (CUDA from sm_80 on, and ROCm)."""

from .backward import flash_attention_bwd
from .forward import flash_attention
from .tangent import flash_attention_jvp

__all__ = ["flash_attention", "flash_attention_bwd", "flash_attention_jvp"]
