"""Calls of state_space_v2."""

from ..formulas.state_space_v2 import formula
from . import _state_space
from ._draws import heads, pick
from ._state_space import DTYPES, draw_call, facts, hidden, sensitivity, values

__all__ = ["DTYPES", "SPLIT", "facts", "formula", "hidden", "results", "sensitivity", "values"]

SHARE = 1
SPLIT = ("b", "h", "g")


def programs(draw, sizes):
    axes = dict(x="s h e", A="h", B="s g d", C="s g d", D="h", dt="s h")
    return draw_call(draw, sizes, {**heads(draw), "e": pick(draw, *sizes.features)}, axes, "h e d")


def results(call):
    return _state_space.results(call, "s h e", "h e d")
