"""Calls of lightning_attention, whose heads decay by their number in the layer."""

import numpy as np

from ..formulas.lightning_attention import formula
from . import _recurrence
from ._draws import chance, pick
from ._recurrence import DTYPES, draw_call, hidden, results, sensitivity, values

__all__ = ["DTYPES", "formula", "hidden", "results", "sensitivity", "values"]

SHARE = 1
SPLIT = ("b",)


def programs(draw, sizes):
    operands, size, options, dtypes = draw_call(draw, sizes, ("g_gamma",) if chance(draw, 20) else ())
    options["layer_idx"], options["num_layers"] = pick(draw, (0, 1), (0, 24), (3, 4), (31, 32))
    return operands, size, options, dtypes


def facts(call, x):
    """The decays are numbers of float32."""
    heads, layers = call.sizes["h"], call.options["num_layers"]
    decays = -8 / heads * (1 - call.options["layer_idx"] / layers) * np.arange(heads)
    return _recurrence.facts(call, x) | {"g_gamma": decays.astype(np.float32)}
