"""Calls of grouped_matmul."""

import jax.numpy as jnp
import numpy as np

from ..formulas.grouped_matmul import formula
from ._draws import along, chance, pick

__all__ = ["formula"]

SHARE = 1
SPLIT = ("n",)
DTYPES = {"rhs_scale": "float32"}


def programs(draw, sizes):
    size = {"m": pick(draw, *sizes.lengths), "k": pick(draw, *sizes.features), "n": pick(draw, *sizes.features)}
    size["e"] = size["f"] = pick(draw, 1, 2, 3, 5, 8)
    options, dtypes = {}, {"group_sizes": pick(draw, *["int32"] * 4, "int64", "uint32", "int16")}
    if chance(draw, 30):
        options["transpose_rhs"] = True
    operands = dict(lhs="m k", rhs="e n k" if options else "e k n", group_sizes="f")
    if chance(draw, 25):
        size["f"] += pick(draw, 0, 1, 3)
        operands["group_offset"] = pick(draw, "", "1")
    if chance(draw, 25):
        operands["existing_out"] = "m n"
        dtypes["existing_out"] = pick(draw, "call", "float32", "bfloat16")
    if chance(draw, 25):
        operands["rhs_scale"] = pick(draw, "", "e", "e n", "e 1 n")
        dtypes["rhs_scale"] = pick(draw, "float32", "float32", "bfloat16")
    if chance(draw, 15):
        dtypes["rhs"] = pick(draw, "int8", "float8_e4m3fn", "float8_e5m2")
    if chance(draw, 50):
        options["preferred_element_type"] = pick(draw, "float32", "bfloat16", "float16")
    if sizes.configs and chance(draw, 15):
        options["config"] = dict(block_m=pick(draw, 8, 16, 33), block_n=pick(draw, 8, 16))
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    if name == "group_sizes":
        total = call.sizes["m"] if rng.random() < 0.5 else rng.integers(call.sizes["m"] + 1)
        shares = rng.dirichlet(np.full(shape, rng.choice([0.2, 4.0])))
        return rng.multinomial(total, shares).astype(np.int32)
    if name == "group_offset":
        return np.full(shape, rng.integers(call.sizes["f"] - call.sizes["e"] + 2), np.int32)
    if name == "rhs_scale":
        return rng.uniform(0.5, 1.5, shape)
    if name == "rhs" and "rhs" in call.dtypes:
        return rng.integers(-8, 8, shape).astype(np.float64)
    return None


def facts(call, x):
    """The matrix of each row in rhs, −1 where there is none."""
    ends, row = np.cumsum(x["group_sizes"].astype(np.int64)), np.arange(call.sizes["m"])
    group = np.searchsorted(ends, row, side="right")
    group = np.where(row < ends[-1], group - int(np.reshape(x.get("group_offset", 0), ())), -1)
    return {"group": np.where((group >= 0) & (group < call.sizes["e"]), group, -1)}


def hidden(call, x):
    """Rows of no group, what stands in the result in the place of others, and what is of groups without rows."""
    group = facts(call, x)["group"]
    none = group < 0
    found = {"lhs": along(none, 0, call.shape("lhs"))}
    empty = ~np.isin(np.arange(call.sizes["e"]), group)
    found |= {name: along(empty, 0, x[name].shape) for name in ("rhs", "rhs_scale") if name in x and x[name].ndim}
    if "existing_out" in x:
        found["existing_out"] = along(~none, 0, call.shape("existing_out"))
    return found


def results(call):
    narrow = call.options.get("preferred_element_type", "float32")
    return [("m n", jnp.dtype("float64" if call.dtype == "float64" else narrow))]
