"""Quantised weights of whole matrices: `quantize`, `dequantize` and `prepack_quantized_weights`."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8, UInt32

from ..errors import shown, type_error, value_error
from ._formats import Format, Mode, encoded, format_of, scales_of, values_of
from ._packing import packed, unpacked

Axis = Literal["row", "col"]
Quantized = (
    tuple[UInt32[Array, "*rows words"], Float[Array, "*rows groups"] | UInt8[Array, "*rows groups"]]
    | tuple[UInt32[Array, "*rows words"], Float[Array, "*rows groups"], Float[Array, "*rows groups"]]
)
FLOATS = ("float16", "bfloat16", "float32", "float64")


def quantize(
    w: Float[Array, "*batch rows columns"],
    /,
    group_size: int | None = None,
    bits: int | None = None,
    mode: Mode = "affine",
    axis: Axis = "row",
) -> Quantized:
    """Weights as codes of a few bits, packed into words of 32, and a scale for each group of them.

    With axis "col" a group is consecutive entries of the last axis of w [..., R, C], and the results are

        codes  uint32 [..., R, C · bits / 32]    code c of a row begins at bit c · bits of its words, lowest bits first
        scales        [..., R, C / group_size]   in modes affine and nf4 in the dtype of w, in the others uint8
        zeros         [..., R, C / group_size]   in mode affine only, in the dtype of w

    With "row" they are those of the transposed matrix: a group is consecutive rows of w, codes [..., C, R · bits / 32].
    The table in `ejkernel.quantization` has the meaning of codes and scales in each mode.

    Args:
        w: floats with at least two axes, finite; magnitudes of at most 2688 in mode nvfp4 and 200704 in mode nvfp8. In
            mode affine with 1 bit, where the scale is the range of a group, that has to be a number of w's dtype.
        group_size: entries that share a scale: a power of two from 16 to 1024 in modes affine and nf4 (default 64), 32
            in mxfp4 and mxfp8, 16 in nvfp4 and nvfp8.
        bits: bits of a code: 1 to 8 in mode affine (default 4), in the others the number in its name.
        mode: affine, nf4, mxfp4, mxfp8, nvfp4 or nvfp8.
        axis: "col" or "row".

    Returns:
        (codes, scales), and (codes, scales, zeros) in mode affine.

    Raises:
        ValueError, TypeError: the mode has no such bits or group size, or the group size does not divide the axis.
    """
    return _quantised("quantize", w, group_size, bits, mode, axis)


def dequantize(
    w: UInt32[Array, "*rows words"],
    scales: Float[Array, "*rows groups"] | UInt8[Array, "*rows groups"],
    zeros: Float[Array, "*rows groups"] | None = None,
    /,
    group_size: int | None = None,
    bits: int | None = None,
    mode: Mode = "affine",
    axis: Axis | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "*batch rows columns"]:
    """The matrix from which `quantize` made codes and scales, within the precision of the mode.

    Args:
        w: the codes, as `quantize` returned them.
        scales: as `quantize` returned them.
        zeros: as `quantize` returned them, in mode affine.
        group_size: as `quantize` was given it.
        bits: as `quantize` was given it.
        mode: as `quantize` was given it.
        axis: None and "col" give the matrix in the layout of the codes, with groups along its last axis; "row" gives
            that transposed, which is what `quantize` was given with "row".
        dtype: the dtype of the result, which is computed in float32, or in float64 if dtype is float64.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit.
    """
    of, dtype = format_of("dequantize", mode, bits, group_size), _float_dtype("dequantize", dtype)
    is_row = axis is not None and _is_row("dequantize", axis)
    w, scales = _matrix("dequantize", "w", w, ("uint32",)), _array("dequantize", "scales", scales)
    zeros = None if zeros is None else _array("dequantize", "zeros", zeros)
    check_quantized("dequantize", w, scales, zeros, of)
    found = dequantized(w, scales, zeros, of, jnp.promote_types(dtype, jnp.float32)).astype(dtype)
    return found.swapaxes(-1, -2) if is_row else found


def prepack_quantized_weights(
    w: Float[Array, "*batch rows columns"],
    /,
    group_size: int | None = None,
    bits: int | None = None,
    mode: Mode = "affine",
    transpose: bool = True,
    axis: Axis | None = None,
) -> Quantized:
    """`quantize` for `quantized_matmul`: of a matrix [K, N] with transpose=False, of [N, K] with transpose=True.

    In both cases the codes are [K, N · bits / 32], in groups of columns of the product, as `quantized_matmul(x,
    *weights)` takes them. `axis`, if given, overrides `transpose`: "row" is True, "col" is False.
    """
    if not isinstance(transpose, bool | np.bool_):
        raise type_error("prepack_quantized_weights", f"transpose is {shown(transpose)}; it must be True or False")
    default = "row" if transpose else "col"
    return _quantised("prepack_quantized_weights", w, group_size, bits, mode, default if axis is None else axis)


# --- Parts ------------------------------------------------------------------------------------------------------------


def _quantised(operation: str, w: Any, group_size: Any, bits: Any, mode: Any, axis: Any) -> Quantized:
    """`quantize`, whose errors name the operation that was called."""
    of = format_of(operation, mode, bits, group_size)
    w = _matrix(operation, "w", w, FLOATS)
    w = w.swapaxes(-1, -2) if _is_row(operation, axis) else w
    if w.shape[-1] % of.group_size:
        other = "col" if axis == "row" else "row"
        raise value_error(
            operation,
            f"group_size is {of.group_size} but axis {axis!r} of w has {w.shape[-1]} entries; it should divide them "
            f"(axis={other!r} groups the entries of the other axis)",
            w=w,
        )
    wide = w.astype(jnp.promote_types(w.dtype, jnp.float32))
    groups = wide.reshape(*w.shape[:-1], w.shape[-1] // of.group_size, of.group_size)
    codes, *scales = encoded(groups, of, w.dtype)
    return packed(codes.reshape(w.shape), of.bits), *scales


def dequantized(w: Array, scales: Array, zeros: Array | None, of: Format, dtype: Any) -> Array:
    """(values − zeros) · scales [..., codes] of words [..., words] and scales [..., groups], in 32 bits or more."""
    values = values_of(unpacked(w, of.bits), of, dtype).reshape(*scales.shape, of.group_size)
    if zeros is not None:
        values = values - zeros.astype(dtype)[..., None]
    return (values * scales_of(scales, of, dtype)[..., None]).reshape(*scales.shape[:-1], -1)


def check_quantized(operation: str, w: Any, scales: Any, zeros: Any, of: Format) -> None:
    """Raises if the shapes or dtypes of scales or zeros do not match the words."""
    named = dict(w=w, scales=scales) | ({} if zeros is None else dict(zeros=zeros))
    _require(operation, "scales", scales, FLOATS if of.has_float_scales else ("uint8",), f" in mode {of.mode}")
    if of.mode == "affine" and zeros is None:
        raise value_error(operation, "zeros are missing; mode affine has one for each scale", **named)
    if of.mode != "affine" and zeros is not None:
        raise value_error(operation, f"zeros are given; mode {of.mode} has none", **named)
    words = w.shape[-1]
    if words % of.words:
        raise value_error(
            operation,
            f"w has {words} words in a row but a group of {of.group_size} codes of {of.bits} bits has {of.words}; "
            "these must divide that",
            **named,
        )
    wanted = (*w.shape[:-1], words // of.words)
    for name, x in named.items():
        if name != "w" and tuple(x.shape) != wanted:
            raise value_error(
                operation,
                f"{name} must be {list(wanted)}: one for each group of {of.group_size} codes of {of.bits} bits",
                **named,
            )
    if zeros is not None:
        _require(operation, "zeros", zeros, FLOATS)


def _float_dtype(operation: str, dtype: Any) -> np.dtype:
    """The dtype that a user asks for; numpy takes None for float64, and much else for a structured dtype."""
    try:
        found = None if dtype is None else np.dtype(dtype)
    except Exception:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise type_error(operation, f"dtype is {shown(dtype)}; it must be a float type")
    return found


def _is_row(operation: str, axis: Any) -> bool:
    if not isinstance(axis, str) or axis not in ("row", "col"):
        raise value_error(operation, f"axis is {shown(axis)}; it must be 'row' or 'col'")
    return axis == "row"


def _array(operation: str, name: str, x: Any) -> Any:
    if isinstance(x, jax.Array | np.ndarray) or hasattr(x, "__jax_array__"):
        return jnp.asarray(x)
    raise type_error(operation, f"{name} must be an array, not {type(x).__name__}")


def _matrix(operation: str, name: str, x: Any, dtypes: tuple[str, ...]) -> Any:
    x = _array(operation, name, x)
    if x.ndim < 2:
        raise value_error(operation, f"{name} has {x.ndim} axes; it must have at least 2: rows, columns", **{name: x})
    _require(operation, name, x, dtypes)
    return x


def _require(operation: str, name: str, x: Any, dtypes: tuple[str, ...], where: str = "") -> None:
    if x.dtype.name not in dtypes:
        rule = f"it must be {'one of ' if len(dtypes) > 1 else ''}{', '.join(dtypes)}"
        raise type_error(operation, f"{name} is {x.dtype}; {rule}{where}", **{name: x})
