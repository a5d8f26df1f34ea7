"""Calls that once failed, each with what was wrong. The search runs them first."""

from .calls import Call

FAILURES: tuple[Call, ...] = ()
