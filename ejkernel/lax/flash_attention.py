"""`ejkernel.lax.flash_attention`."""

from ..modules.operations.flash_attention import FlashAttention
from ._native import native

flash_attention = native(FlashAttention)
