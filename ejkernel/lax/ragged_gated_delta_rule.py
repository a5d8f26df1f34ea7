"""`ejkernel.lax.ragged_gated_delta_rule`."""

from ..modules.operations.ragged_gated_delta_rule import RaggedGatedDeltaRule
from ._native import native

ragged_gated_delta_rule = native(RaggedGatedDeltaRule)
