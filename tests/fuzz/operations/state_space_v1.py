"""Calls of state_space_v1: channels are the letter h."""

from ..formulas.state_space_v1 import formula
from . import _state_space
from ._draws import pick
from ._state_space import DTYPES, draw_call, facts, hidden, sensitivity, values

__all__ = ["DTYPES", "SPLIT", "facts", "formula", "hidden", "results", "sensitivity", "values"]

SHARE = 1
SPLIT = ("b", "h")


def programs(draw, sizes):
    axes = dict(x="s h", A="h d", B="s d", C="s d", D="h", dt="s h")
    return draw_call(draw, sizes, {"h": pick(draw, 1, 2, 8, 20)}, axes, "h d")


def results(call):
    return _state_space.results(call, "s h", "h d")
