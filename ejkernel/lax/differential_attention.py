"""`ejkernel.lax.differential_attention`."""

from ..modules.operations.differential_attention import differential_attention

__all__ = ["differential_attention"]
