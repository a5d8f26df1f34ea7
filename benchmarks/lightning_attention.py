"""lightning_attention beside flash-linear-attention."""

from ._recurrence import case

__all__ = ["case"]
