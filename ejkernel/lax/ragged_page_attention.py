"""`ejkernel.lax.ragged_page_attention`."""

from ..modules.operations.ragged_page_attention import RaggedPageAttention
from ._native import native

ragged_page_attention = native(RaggedPageAttention)
