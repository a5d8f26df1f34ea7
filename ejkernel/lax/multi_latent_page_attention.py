"""`ejkernel.lax.multi_latent_page_attention`."""

from ..modules.operations.multi_latent_page_attention import MultiLatentPageAttention
from ._native import native

multi_latent_page_attention = native(MultiLatentPageAttention)
