"""`ejkernel.lax.page_attention`."""

from ..modules.operations.page_attention import PageAttention
from ._native import native

page_attention = native(PageAttention)
