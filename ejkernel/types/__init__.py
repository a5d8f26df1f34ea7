"""Plain values that every floor above may use: enums, targets, configs."""

from ._repr import ShortRepr
from .config import BwdParams, FwdParams, KernelConfig
from .enums import Backend, Platform
from .target import Target

__all__ = ["Backend", "BwdParams", "FwdParams", "KernelConfig", "Platform", "ShortRepr", "Target"]
