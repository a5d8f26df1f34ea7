"""`ejkernel.lax.gated_delta_rule`."""

from ..modules.operations.gated_delta_rule import GatedDeltaRule
from ._native import native

gated_delta_rule = native(GatedDeltaRule)
