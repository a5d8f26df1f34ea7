"""`ejkernel.lax.ragged_page_attention_v3_turboquant`."""

from ..modules.operations.ragged_page_attention_v3_turboquant import RaggedPageAttentionV3TurboQuant
from ._native import native

ragged_page_attention_v3_turboquant = native(RaggedPageAttentionV3TurboQuant)
