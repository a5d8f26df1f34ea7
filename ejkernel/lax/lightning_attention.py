"""`ejkernel.lax.lightning_attention`."""

from ..modules.operations.lightning_attention import LightningAttention
from ._native import native

lightning_attention = native(LightningAttention)
