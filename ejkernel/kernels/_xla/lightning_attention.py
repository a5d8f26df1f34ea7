"""lightning_attention in XLA: one of the family in `_recurrence`."""

from ._differentiated import register
from ._recurrence import recurrence, recurrence_bwd, recurrence_jvp, reference

__all__ = ["reference"]

register("lightning_attention", recurrence, recurrence_jvp, recurrence_bwd)
