"""lightning_attention in XLA: by the linear recurrence of `_recurrence`."""

from ._differentiated import register
from ._recurrence import recurrence, recurrence_bwd, recurrence_jvp, reference

__all__ = ["reference"]

register("lightning_attention", recurrence, recurrence_jvp, recurrence_bwd)
