"""Plain values that every layer above may use: enums, targets, configs, the types of arguments."""

from ._repr import ShortRepr
from .arguments import (
    BlockMask,
    ConfigLike,
    CuSeqlens,
    DropoutKey,
    LogitsBias,
    LogitsMask,
    RecurrentState,
    Scale,
    Sinks,
    Window,
)
from .config import BwdParams, FwdParams, KernelConfig, OperationConfig, checked_config
from .enums import Backend, Platform
from .recurrence_shapes import RECURRENCE_SHAPES, RecurrenceShape
from .shapes import ATTENTION_SHAPES, AttentionShape, band, visible_pairs
from .target import Target

__all__ = [
    "ATTENTION_SHAPES",
    "RECURRENCE_SHAPES",
    "AttentionShape",
    "Backend",
    "BlockMask",
    "BwdParams",
    "ConfigLike",
    "CuSeqlens",
    "DropoutKey",
    "FwdParams",
    "KernelConfig",
    "LogitsBias",
    "LogitsMask",
    "OperationConfig",
    "Platform",
    "RecurrenceShape",
    "RecurrentState",
    "Scale",
    "ShortRepr",
    "Sinks",
    "Target",
    "Window",
    "band",
    "checked_config",
    "visible_pairs",
]
