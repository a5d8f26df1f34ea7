"""`ejkernel.lax.native_sparse_decode_attention`."""

from ..modules.operations.native_sparse_decode_attention import NativeSparseDecodeAttention
from ._native import native

native_sparse_decode_attention = native(NativeSparseDecodeAttention)
