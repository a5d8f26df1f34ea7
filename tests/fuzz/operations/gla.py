"""Calls of gla."""

from ..formulas.gla import formula
from ._recurrence import DTYPES, SPLIT, draw_call, facts, hidden, results, sensitivity, values

__all__ = ["DTYPES", "SPLIT", "facts", "formula", "hidden", "results", "sensitivity", "values"]

SHARE = 1


def programs(draw, sizes):
    return draw_call(draw, sizes, ("gk",))
