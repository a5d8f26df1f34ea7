"""`ejkernel.lax.gla`."""

from ..modules.operations.gla import GLA
from ._native import native

gla = native(GLA)
