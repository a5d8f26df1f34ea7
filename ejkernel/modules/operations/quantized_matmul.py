"""quantized_matmul as an operation: from the public arguments to the operands and spec of the primitive, and back."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8, UInt32

from ...errors import value_error
from ...ops.utils.operands import random_like
from ...primitives._batching import reshape_axes, split_axis
from ...primitives.quantized_matmul import Operands, QuantizedMatmulSpec
from ...primitives.quantized_matmul import quantized_matmul as algorithm
from ...quantization import Format, Mode, format_of
from ...quantization._weights import check_quantized
from ...types.quantized_matmul import QuantizedMatmulConfig
from .._operation import Operation, Prepared
from ._arguments import align, array, array_or_none, require_dtype, require_known, require_rank, static_bool

NAME = algorithm.name

Rows: TypeAlias = Float[Array, "m k"] | Float[Array, "b m k"]
Product: TypeAlias = Float[Array, "m n"] | Float[Array, "b m n"]
Scales: TypeAlias = Float[Array, "rows groups"] | UInt8[Array, "rows groups"]


def quantized_matmul_arguments(
    x: Rows,
    w: UInt32[Array, "rows words"],
    scales: Scales,
    zeros: Float[Array, "rows groups"] | None = None,
    *,
    transpose: bool = False,
    group_size: int | None = None,
    bits: int | None = None,
    mode: Mode = "affine",
) -> Prepared[Product]:
    """Rows times a matrix of quantised weights, which are stored as codes of a few bits: x · W, or x · Wᵀ.

    With v_rc the value of code c in row r, and γ the group of c:

        W_rc = (v_rc − zeros_rγ) scales_rγ  in mode affine,        W_rc = v_rc scales_rγ  in others

    W is computed in float32 and rounded to the dtype of x; products are added up in float32. XLA dequantises and
    multiplies one block of columns of W after the other, so that a large W is never in memory as a whole.
    Differentiable in x, and in scales and zeros where these are floats, to any order; codes have no derivative.
    Rows of x and columns of W, in whole groups, may be split over devices, without communication.

    Args:
        x: [M, K], or [B, M, K], of a float dtype.
        w: codes, packed into words, uint32: [K, N · bits / 32], or with transpose [N, K · bits / 32], as
            `ejkernel.quantization.quantize` and `prepack_quantized_weights` make them.
        scales: [K, N / group_size], or with transpose [N, K / group_size]: floats in modes affine and nf4, and uint8 in
            the others.
        zeros: for mode affine, floats in the shape of scales.
        transpose: whether to multiply by Wᵀ: rows of codes are then columns of the product, and groups are along K.
        group_size: the number of codes that share a scale; by default that of the mode, 64 in modes affine and nf4.
        bits: the bits of a code; by default those of the mode, 4 in mode affine.
        mode: affine, nf4, mxfp4, mxfp8, nvfp4 or nvfp8, as in `ejkernel.quantization.quantize`.

    Returns:
        o [M, N] or [B, M, N] in the dtype of x.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    nf4: QLoRA, arXiv 2305.14314; mxfp4 and mxfp8: Microscaling, arXiv 2310.10537.
    """
    of = format_of(NAME, mode, bits, group_size)
    transpose = static_bool(NAME, "transpose", transpose)
    x, w, scales = (array(NAME, name, a) for name, a in (("x", x), ("w", w), ("scales", scales)))
    zeros = array_or_none(NAME, "zeros", zeros)
    _check_arrays(x, w, scales, zeros, of, transpose)
    batched = x if len(x.shape) == 3 else x[None]
    rows, groups = scales.shape
    first, last = ((1, rows), (1, groups)) if transpose else ((rows, 1), (groups, 1))

    def per_group(name: str, a: Array, *words: int) -> Array:
        of_groups = split_axis(NAME, name, a, 1, (*last, *words), int(transpose), f"groups of {name}")
        return reshape_axes(of_groups, 0, 1, (1, *first))

    features, which = ((1, groups, of.group_size), 1) if transpose else ((rows, 1, 1), 0)
    operands = Operands(
        split_axis(NAME, "x", batched, 2, features, which, "groups of x"),
        per_group("w", w, of.words),
        per_group("scales", scales),
        jnp.arange(1 if transpose else of.group_size, dtype=jnp.int32)[None],
        None if zeros is None else per_group("zeros", zeros),
    )
    named = align(algorithm.forward, {name: a for name, a in operands._asdict().items() if a is not None})

    def finish(out):
        o = reshape_axes(out["o"], 2, 3, (rows if transpose else groups * of.group_size,))
        return o if len(x.shape) == 3 else o[0]

    return Prepared(named, QuantizedMatmulSpec(of.mode, of.bits, of.group_size, transpose), finish)


def _check_arrays(x, w, scales, zeros, of: Format, transpose: bool) -> None:
    if len(x.shape) not in (2, 3):
        raise value_error(NAME, f"x has {len(x.shape)} axes; it must have 2, rows and features, or 3 with a batch", x=x)
    require_rank(NAME, 2, "rows, words", w=w)
    require_dtype(NAME, np.floating, "a float type", x=x)
    if w.dtype != np.uint32:
        raise value_error(NAME, f"w is {w.dtype}; it must be uint32, words of packed codes", w=w)
    for axis, size in zip(("rows", "words"), w.shape, strict=True):
        require_known(NAME, f"the number of {axis} of w", size, w=w)
        if size == 0:
            raise value_error(NAME, f"w has 0 {axis}; it must have some", w=w)
    check_quantized(NAME, w, scales, zeros, of)
    features = scales.shape[1] * of.group_size if transpose else w.shape[0]
    if x.shape[-1] != features:
        of_w = "groups of w have" if transpose else "w has rows for"
        raise value_error(
            NAME, f"x has {x.shape[-1]} features but {of_w} {features}; they must be equal", x=x, w=w, scales=scales
        )


class QuantizedMatmul(Operation):
    """A product with quantised weights: `ejkernel.lax.quantized_matmul` as a kernel object."""

    algorithm = algorithm
    config_class = QuantizedMatmulConfig
    prepare_arguments = staticmethod(quantized_matmul_arguments)

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with four bits in groups of 64 and a few rows, as in a decoding step of a small batch."""
        array = jax.ShapeDtypeStruct
        groups = array((256, 4), jnp.bfloat16)
        return dict(x=array((16, 256), jnp.bfloat16), w=array((256, 32), jnp.uint32), scales=groups, zeros=groups)

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Random rows, scales and codes, without the bytes that are NaN in fp8."""
        values = random_like({name: x for name, x in operands.items() if name not in ("w", "columns")})
        key, w = jax.random.key(0), operands["w"]
        values["w"] = jax.random.bits(key, w.shape, jnp.uint32) & jnp.uint32(0xBFBFBFBF)
        values["columns"] = jax.lax.broadcasted_iota(jnp.int32, operands["columns"].shape, 1)
        if values["scales"].dtype == jnp.uint8:
            values["scales"] = jax.random.randint(key, operands["scales"].shape, 1, 8).astype(jnp.uint8)
        return {name: values[name] for name in operands}
