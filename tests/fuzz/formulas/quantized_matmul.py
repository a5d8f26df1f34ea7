"""Rows times a matrix that is the numbers of codes, less the zeros and times the scales of their groups."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ejkernel.quantization._formats import NF4


def group_size(options: Mapping[str, Any]) -> int:
    return options.get("group_size", 32 if options["mode"].startswith("mx") else 16)


def numbers_of_codes(words: np.ndarray, options: Mapping[str, Any], n: int) -> np.ndarray:
    """[rows, n] in float64, code by code of the stream of bits that a row is."""
    mode = options["mode"]
    bits = options.get("bits", 8 if mode.endswith("8") else 4)
    stream = np.unpackbits(np.ascontiguousarray(words).astype("<u4").view(np.uint8), axis=-1, bitorder="little")
    codes = stream.reshape(len(words), n, bits) @ (1 << np.arange(bits))
    if mode == "affine":
        return codes.astype(np.float64)
    if mode == "nf4":
        return np.asarray(NF4)[codes]
    kind = ml_dtypes.float8_e4m3fn if bits == 8 else ml_dtypes.float4_e2m1fn
    return codes.astype(np.uint8).view(kind).astype(np.float64)


def numbers_of_scales(scales: np.ndarray, options: Mapping[str, Any]) -> np.ndarray:
    if options["mode"].startswith("mx"):
        return 2.0 ** scales.view(np.int8)
    return scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def formula(x, facts, options, rounded):
    """o = x · W, or x · Wᵀ, where W_rc = (v_rc − z_rγ) s_rγ is rounded."""
    size, rows = group_size(options), x["x"]
    of_codes = lambda a: jnp.repeat(jnp.asarray(a, rows.dtype), size, axis=1)
    relative = jnp.asarray(facts["values"], rows.dtype)
    if "zeros" in x:
        relative = relative - of_codes(x["zeros"])
    w = rounded(relative * of_codes(facts["scales"] if "scales" in facts else x["scales"]))
    return [rounded(jnp.matmul(rows, w.T if options.get("transpose") else w, precision="highest"))]
