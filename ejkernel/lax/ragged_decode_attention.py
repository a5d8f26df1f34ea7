"""`ejkernel.lax.ragged_decode_attention`."""

from ..modules.operations.ragged_decode_attention import RaggedDecodeAttention
from ._native import native

ragged_decode_attention = native(RaggedDecodeAttention)
