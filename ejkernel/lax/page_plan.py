"""`ejkernel.lax.page_plan`."""

from ..modules.operations.page_plan import page_plan

__all__ = ["page_plan"]
