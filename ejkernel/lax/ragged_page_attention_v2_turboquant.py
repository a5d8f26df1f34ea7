"""`ejkernel.lax.ragged_page_attention_v2_turboquant`."""

from ..modules.operations.ragged_page_attention_v2_turboquant import RaggedPageAttentionV2TurboQuant
from ._native import native

ragged_page_attention_v2_turboquant = native(RaggedPageAttentionV2TurboQuant)
