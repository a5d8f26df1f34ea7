"""Plain values that all layers above may use: enums, targets, configs, types of arguments, and `MaskInfo`."""

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
from .mask_info import MaskInfo
from .shapes.flash_attention import SHAPES as ATTENTION_SHAPES
from .shapes.flash_attention import AttentionShape
from .target import Target
from .visible import band, visible_pairs

__all__ = [
    "ATTENTION_SHAPES",
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
    "MaskInfo",
    "OperationConfig",
    "Platform",
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
