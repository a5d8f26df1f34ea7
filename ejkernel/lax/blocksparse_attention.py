"""`ejkernel.lax.blocksparse_attention`."""

from ..modules.operations.blocksparse_attention import BlocksparseAttention
from ._native import native

blocksparse_attention = native(BlocksparseAttention)
