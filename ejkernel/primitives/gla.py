"""gla: the linear recurrence with a decay for each key feature of each token."""

from ._recurrence import recurrence

gla = recurrence("gla")
