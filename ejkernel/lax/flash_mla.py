"""`ejkernel.lax.flash_mla`."""

from ..modules.operations.flash_mla import FlashMLA
from ._native import native

flash_mla = native(FlashMLA)
