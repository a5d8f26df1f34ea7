"""Plain values that every floor above may use: enums, targets, configs."""

from ._repr import ShortRepr
from .config import BwdParams, FwdParams, KernelConfig, checked_config
from .enums import Backend, Platform
from .recurrence_shapes import RECURRENCE_SHAPES, RecurrenceShape
from .shapes import ATTENTION_SHAPES, AttentionShape, visible_pairs
from .target import Target

__all__ = [
    "ATTENTION_SHAPES",
    "RECURRENCE_SHAPES",
    "AttentionShape",
    "Backend",
    "BwdParams",
    "FwdParams",
    "KernelConfig",
    "Platform",
    "RecurrenceShape",
    "ShortRepr",
    "Target",
    "checked_config",
    "visible_pairs",
]
