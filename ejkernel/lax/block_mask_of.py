"""`ejkernel.lax.block_mask_of`."""

from ..modules.operations.block_mask_of import block_mask_of

__all__ = ["block_mask_of"]
