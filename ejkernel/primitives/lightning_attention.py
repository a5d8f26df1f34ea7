"""lightning_attention: the linear recurrence with one decay for each head."""

from ._recurrence import recurrence

lightning_attention = recurrence("lightning_attention")
