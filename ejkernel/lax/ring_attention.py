"""`ejkernel.lax.ring_attention`."""

from ..modules.operations.ring_attention import ring_attention

__all__ = ["ring_attention"]
