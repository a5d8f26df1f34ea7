"""Calls of recurrent."""

from ._recurrence import RecurrenceShape

_MODELS = (
    # No model: RetNet's decays, arXiv 2307.08621
    RecurrenceShape("retention-h16-d128", "recurrent", 16, 128, 128),
    # fla-hub/retnet-1.3B-100B: hidden 2048 on 8 heads, expand_k 1, expand_v 2
    RecurrenceShape("retnet-1.3b", "recurrent", 8, 256, 512),
)

SHAPES: dict[str, RecurrenceShape] = {shape.name: shape for shape in _MODELS}
"""By name."""
