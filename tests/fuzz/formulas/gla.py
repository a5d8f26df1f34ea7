"""gla: the linear recurrence that decays by key feature."""

from .recurrent import formula

__all__ = ["formula"]
