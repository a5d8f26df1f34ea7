"""Calls of gla taken from real models."""

from ._recurrence import RecurrenceShape

_MODELS = (
    # fla-hub/gla-1.3B-100B: hidden 2048 on 4 heads, expand_k 0.5, expand_v 1
    RecurrenceShape("gla-1.3b", "gla", 4, 256, 512),
    # No model: the square that published tables of such kernels have in common
    RecurrenceShape("gla-h16-d128", "gla", 16, 128, 128),
)

SHAPES: dict[str, RecurrenceShape] = {shape.name: shape for shape in _MODELS}
"""By name."""
