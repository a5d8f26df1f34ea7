"""`ejkernel.lax.grouped_matmul`."""

from ..modules.operations.grouped_matmul import GroupedMatmul
from ._native import native

grouped_matmul = native(GroupedMatmul)
