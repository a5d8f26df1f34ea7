"""`ejkernel.lax.lightning_indexer`."""

from ..modules.operations.lightning_indexer import lightning_indexer

__all__ = ["lightning_indexer"]
