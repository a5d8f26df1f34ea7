"""Calls of recurrent."""

from ..formulas.recurrent import formula
from ._draws import chance
from ._recurrence import DTYPES, GATES, SPLIT, draw_call, facts, hidden, results, sensitivity, values

__all__ = ["DTYPES", "SPLIT", "facts", "formula", "hidden", "results", "sensitivity", "values"]

SHARE = 1


def programs(draw, sizes):
    return draw_call(draw, sizes, tuple(name for name in GATES if chance(draw, 40)))
