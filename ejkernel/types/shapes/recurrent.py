"""Calls of recurrent."""

from ._recurrence import RecurrenceShape

_MODELS = (
    # No model: RetNet's decays, arXiv 2307.08621
    RecurrenceShape("retention-h16-d128", "recurrent", 16, 128, 128),
)

SHAPES: dict[str, RecurrenceShape] = {shape.name: shape for shape in _MODELS}
"""By name."""
