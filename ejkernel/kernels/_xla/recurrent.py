"""recurrent in XLA: one of the family in `_recurrence`."""

from ._recurrence import reference, register

__all__ = ["reference"]

register("recurrent")
