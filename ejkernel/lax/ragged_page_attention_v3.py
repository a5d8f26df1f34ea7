"""`ejkernel.lax.ragged_page_attention_v3`."""

from ..modules.operations.ragged_page_attention_v3 import RaggedPageAttentionV3
from ._native import native

ragged_page_attention_v3 = native(RaggedPageAttentionV3)
