"""`ejkernel.lax.native_sparse_blocks`."""

from ..modules.operations.native_sparse_blocks import NativeSparseBlocks
from ._native import native

native_sparse_blocks = native(NativeSparseBlocks)
