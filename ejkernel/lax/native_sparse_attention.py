"""`ejkernel.lax.native_sparse_attention`."""

from ..modules.operations.native_sparse_attention import NativeSparseAttention
from ._native import native

native_sparse_attention = native(NativeSparseAttention)
