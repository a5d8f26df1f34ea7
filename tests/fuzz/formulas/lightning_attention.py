"""lightning_attention: the linear recurrence with one constant decay a head."""

from .recurrent import formula

__all__ = ["formula"]
