"""recurrent: the linear recurrence with any of its decays."""

from ._recurrence import recurrence

recurrent = recurrence("recurrent")
