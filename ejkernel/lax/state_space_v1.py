"""`ejkernel.lax.state_space_v1`."""

from ..modules.operations.state_space_v1 import StateSpaceV1
from ._native import native

state_space_v1 = native(StateSpaceV1)
