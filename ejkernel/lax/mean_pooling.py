"""`ejkernel.lax.mean_pooling`."""

from ..modules.operations.mean_pooling import MeanPooling
from ._native import native

mean_pooling = native(MeanPooling)
