"""Calls of lightning_attention taken from real models."""

from ._recurrence import RecurrenceShape

_MODELS = (
    # MiniMaxAI/MiniMax-Text-01: 64 heads of 128, seven of eight layers linear
    RecurrenceShape("minimax-text-01", "lightning_attention", 64, 128, 128, batch=2),
    # No model: the square that published tables of such kernels have in common
    RecurrenceShape("lightning-h16-d128", "lightning_attention", 16, 128, 128),
)

SHAPES: dict[str, RecurrenceShape] = {shape.name: shape for shape in _MODELS}
"""By name."""
