"""`ejkernel.lax.ring_order`."""

from ..modules.operations.ring_order import ring_order

__all__ = ["ring_order"]
