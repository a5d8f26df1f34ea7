"""`ejkernel.lax.recurrent`."""

from ..modules.operations.recurrent import Recurrent
from ._native import native

recurrent = native(Recurrent)
