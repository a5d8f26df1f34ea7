"""`ejkernel.lax.merge_attention`."""

from ..modules.operations.merge_attention import merge_attention

__all__ = ["merge_attention"]
