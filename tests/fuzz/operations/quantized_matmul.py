"""Calls of quantized_matmul: rows k or n of codes, u groups, p words in each; c columns where u are groups of them."""

import jax.numpy as jnp
import numpy as np

from ..formulas.quantized_matmul import formula, group_size, numbers_of_codes, numbers_of_scales
from ._draws import chance, pick, seldom

__all__ = ["formula"]

SHARE = 1
SPLIT = ("b", "n")
DTYPES = {}
FORMATS = (
    *(("affine", bits, 16) for bits in (2, 4, 6, 8)),
    *(("affine", bits, 32) for bits in (1, 3, 4, 5, 7)),
    *(("nf4", 4, size) for size in (16, 64)),
    *(("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16), ("nvfp8", 8, 16)),
)
ON = {
    "triton": dict(
        lengths=(1, 3, 8, 16, 17, 77, 21, 33, 64), dtypes=(*["bfloat16", "float16"] * 5, "float32", "bfloat16")
    )
}
IN_TRITON = tuple(of for of in FORMATS if of[:2] in (("affine", 2), ("affine", 4), ("affine", 8)))


def programs(draw, sizes):
    in_triton = sizes.platform == "triton" and not seldom(draw)
    mode, bits, group = pick(draw, *(IN_TRITON if in_triton else FORMATS))
    size = {"m": pick(draw, *sizes.lengths), "u": pick(draw, 1, 2, 3)}
    size["p"] = size["u"] * group * bits // 32
    options, dtypes = {"mode": mode}, {"w": "uint32", "scales": "uint8"}
    if mode in ("affine", "nf4"):
        options["group_size"] = group
        dtypes["scales"] = pick(draw, "call", "float32", "bfloat16")
    if mode == "affine":
        options["bits"] = bits
        dtypes["zeros"] = pick(draw, "call", "float32", "bfloat16")
    if chance(draw, 50):
        options["transpose"] = True
        size |= {"n": pick(draw, *sizes.features), "k": size["u"] * group}
    else:
        size |= {"k": pick(draw, *sizes.features), "c": size["u"] * group}
    rows = "n" if "n" in size else "k"
    operands = dict(x="m k", w=f"{rows} p", scales=f"{rows} u")
    if mode == "affine":
        operands["zeros"] = f"{rows} u"
    if chance(draw, 40):
        size["b"], operands["x"] = pick(draw, 1, 2, 3), "b m k"
    if sizes.configs and chance(draw, 40):
        options["config"] = dict(block_n=pick(draw, 1, 5, 16, 40))
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    if name == "w":  # no bits of an exponent that are all 1, as those of NaN in e4m3 are
        return rng.integers(2**32, size=shape, dtype=np.uint32) & np.uint32(0xBFBFBFBF)
    if name == "scales" and call.dtypes["scales"] == "uint8":
        exponents = rng.integers(-4, 4, shape).astype(np.int8).view(np.uint8)
        return exponents if call.options["mode"].startswith("mx") else rng.integers(0x28, 0x48, shape).astype(np.uint8)
    if name == "scales":
        return rng.choice([-1, 1, 1, 1], shape) * rng.uniform(0.1, 0.6, shape)
    if name == "zeros":
        return rng.uniform(0, 2 ** call.options["bits"], shape)
    return None


def facts(call, x):
    """The numbers of the codes and, where they are no floats, of the scales."""
    found = {"values": numbers_of_codes(x["w"], call.options, call.sizes["u"] * group_size(call.options))}
    return (
        found if call.dtypes["scales"] != "uint8" else found | {"scales": numbers_of_scales(x["scales"], call.options)}
    )


def hidden(call, x):
    """Everything is read."""
    return {}


def results(call):
    batch, columns = "b " if "b" in call.sizes else "", "n" if "n" in call.sizes else "c"
    return [(f"{batch}m {columns}", jnp.dtype(call.dtype))]
