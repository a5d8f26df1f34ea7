"""recurrent in Triton: one of the family in `_recurrence`."""

from ._recurrence import register

register("recurrent")
