"""The type variables of the framework."""

from typing import TypeVar

Cfg = TypeVar("Cfg")
"""A kernel's config: a frozen dataclass."""

Out = TypeVar("Out")
"""What a kernel returns: an array or a tree of arrays."""
