"""`ejkernel.lax.state_space_v2`."""

from ..modules.operations.state_space_v2 import StateSpaceV2
from ._native import native

state_space_v2 = native(StateSpaceV2)
