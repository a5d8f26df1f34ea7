"""The formats of quantised weights: the bits and groups that each mode allows, and the values of codes and scales.

| mode | bits | values of a group | value of a code | scale of a group |
|---|---|---|---|---|
| affine | 1 to 8 | 16 to 1024 | (code − zero) · scale | a float; `zeros` has the zero, a float too |
| nf4 | 4 | 16 to 1024 | NF4[code] · scale | a float, the largest magnitude of the group |
| mxfp4 | 4 | 32 | e2m1(code) · 2^scale | uint8 that holds an int8 in two's complement |
| mxfp8 | 8 | 32 | e4m3(code) · 2^scale | as mxfp4 |
| nvfp4 | 4 | 16 | e2m1(code) · e4m3(scale) | uint8 that holds a float8_e4m3fn |
| nvfp8 | 8 | 16 | e4m3(code) · e4m3(scale) | as nvfp4 |

e2m1 and e4m3 are floats with these bits of exponent and mantissa (OCP microscaling formats, v1.0); e4m3 is the type
without infinities, `float8_e4m3fn`. The OCP's e8m0 is biased: it is the exponent of mxfp4 and mxfp8 plus 127. NF4 are
the quantiles of QLoRA, arXiv 2305.14314, appendix E. Powers of two, e2m1 and e4m3 are exact in float32.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..errors import shown, type_error, value_error
from ._packing import period

Mode = Literal["affine", "nf4", "mxfp4", "mxfp8", "nvfp4", "nvfp8"]

GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)
# The bits and group sizes of each mode; where there is a choice, the defaults are 4 bits and groups of 64.
BITS: dict[str, tuple[int, ...]] = {
    "affine": (1, 2, 3, 4, 5, 6, 7, 8),
    "nf4": (4,),
    "mxfp4": (4,),
    "mxfp8": (8,),
    "nvfp4": (4,),
    "nvfp8": (8,),
}
SIZES: dict[str, tuple[int, ...]] = {
    "affine": GROUP_SIZES,
    "nf4": GROUP_SIZES,
    "mxfp4": (32,),
    "mxfp8": (32,),
    "nvfp4": (16,),
    "nvfp8": (16,),
}

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST_E4M3 = 448.0
_SMALLEST_E4M3 = 2.0**-9


@dataclass(frozen=True)
class Format:
    """A mode with its bits per code and the number of values that share a scale."""

    mode: str
    bits: int
    group_size: int

    @property
    def words(self) -> int:
        """32-bit words of the codes of a group."""
        return self.group_size * self.bits // 32

    @property
    def has_float_scales(self) -> bool:
        return self.mode in ("affine", "nf4")

    @property
    def largest(self) -> float:
        """The largest value of a code of mxfp and nvfp."""
        return E2M1[-1] if self.bits == 4 else LARGEST_E4M3


def format_of(operation: str, mode: str, bits: int | None = None, group_size: int | None = None) -> Format:
    """The format that a user asks for, with the defaults of its mode; raises if there is no such format."""
    if not isinstance(mode, str) or mode not in BITS:
        raise value_error(operation, f"mode is {shown(mode)}; it must be one of {', '.join(BITS)}")
    bits = _one_of(operation, mode, "bits", bits, BITS[mode], default=4)
    size = _one_of(operation, mode, "group_size", group_size, SIZES[mode], default=64)
    if size % period(bits):
        raise value_error(
            operation,
            f"group_size is {size} with {bits} bits; it must be a multiple of {period(bits)}, "
            "so that the codes of a group fill whole words of 32 bits",
        )
    return Format(mode, bits, size)


def _one_of(operation: str, mode: str, name: str, x: Any, allowed: tuple[int, ...], default: int) -> int:
    if x is None:
        return default if default in allowed else allowed[0]
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise type_error(operation, f"{name} is {shown(x)}; it must be an int or None")
    if x not in allowed:
        rule = f"one of {', '.join(map(str, allowed))}" if len(allowed) > 1 else f"{allowed[0]}"
        raise value_error(operation, f"{name} is {shown(x)}; mode {mode} has {rule}")
    return int(x)


# --- The values of codes and scales -----------------------------------------------------------------------------------


def values_of(codes: Array, of: Format, dtype: Any) -> Array:
    """The values of codes, before scale and zero, in a float dtype of at least 32 bits."""
    if of.mode == "affine":
        return codes.astype(dtype)
    if of.mode == "nf4":
        return _looked_up(codes, NF4, dtype)
    return _e2m1(codes, dtype) if of.bits == 4 else _e4m3(codes, dtype)


def scales_of(scales: Array, of: Format, dtype: Any) -> Array:
    """The factors of groups, as floats."""
    if of.has_float_scales:
        return scales.astype(dtype)
    if of.mode.startswith("nvfp"):
        return _e4m3(scales, dtype)
    return jnp.ldexp(jnp.ones((), dtype), lax.bitcast_convert_type(scales, jnp.int8).astype(jnp.int32))


def _e2m1(codes: Array, dtype: Any) -> Array:
    """The values of e2m1 codes, by float32 bit patterns with a bias of 127 instead of 1; 0 and 0.5 are made apart."""
    magnitude = codes & 7
    normal = lax.bitcast_convert_type((magnitude << 22) + np.uint32(126 << 23), jnp.float32)
    found = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * np.float32(0.5), normal)
    return jnp.where(codes >= 8, -found, found).astype(dtype)


def _e4m3(x: Array, dtype: Any) -> Array:
    """The values of e4m3 codes, likewise: XLA's conversion is slower on a CPU. Below 8: multiples of 2^−9; 127: NaN."""
    codes = x.astype(jnp.uint32)
    magnitude = codes & 127
    normal = lax.bitcast_convert_type((magnitude << 20) + np.uint32(120 << 23), jnp.float32)
    found = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * np.float32(2**-9), normal)
    found = jnp.where(magnitude == 127, np.float32(np.nan), found)
    return jnp.where(codes >= 128, -found, found).astype(dtype)


def _looked_up(codes: Array, table: tuple[float, ...], dtype: Any) -> Array:
    """table[codes] by selects, bit by bit: unlike a gather, XLA fuses it into what follows."""
    found = [jnp.asarray(x, dtype) for x in table]
    for bit in range(len(table).bit_length() - 1):
        is_set = (codes >> bit) & 1 == 1
        found = [jnp.where(is_set, one, zero) for zero, one in zip(found[::2], found[1::2], strict=True)]
    return found[0]


# --- The scales and codes of weights ----------------------------------------------------------------------------------


def encoded(w: Array, of: Format, dtype: Any) -> tuple[Array, ...]:
    """The codes, scales and, in mode affine, zeros of groups [..., group_size] of floats of at least 32 bits.

    Float scales and zeros are in `dtype`. Each code has the value nearest to the weight, given the scale and the zero
    as they are stored, of the values that are finite in `dtype`.
    """
    if of.mode == "affine":
        return _affine(w, of, dtype)
    if of.mode == "nf4":
        w, factor = _moderate(w)
        scales = _or_one(jnp.abs(w).max(-1).astype(dtype))
        wide = scales.astype(w.dtype)
        return _nearest_nf4(w / wide[..., None]), (wide * factor).astype(dtype)
    largest = jnp.abs(w).max(-1)
    scales = (_scales_of_nvfp if of.mode.startswith("nvfp") else _exponents)(largest / of.largest, of)
    factors = scales_of(scales, of, w.dtype)[..., None]
    codes = (_nearest_e2m1 if of.bits == 4 else _nearest_e4m3)(w / factors)
    # The code before has the same sign and the next smaller magnitude.
    is_infinite = jnp.abs(values_of(codes, of, w.dtype) * factors) > float(jnp.finfo(dtype).max)
    return codes - is_infinite.astype(codes.dtype), scales


def _affine(w: Array, of: Format, dtype: Any) -> tuple[Array, Array, Array]:
    """Codes of mode affine: the range from code 0 to the last one covers the smallest to the largest weight.

    Rounding a zero to p bits may shift values by |w|·2^−p/scale codes, and so may rounding the scale. The range is
    enlarged by as much, as the ends of a group far from 0 would be cut off otherwise. So that the ends stay finite, the
    range has no weights within 4·eps of the largest float. In float16 the scale is also large enough to keep the zero
    finite.
    """
    last, limits = 2**of.bits - 1, jnp.finfo(dtype)
    most, least = float(limits.max), max(float(limits.smallest_subnormal), float(jnp.finfo(jnp.float32).tiny))
    end = most * (1 - 4 * float(limits.eps))
    w, factor = _moderate(w.clip(-end, end))
    smallest, magnitude = w.min(-1), jnp.abs(w).max(-1)
    margin = float(limits.eps) * magnitude
    scales = jnp.maximum((w.max(-1) - smallest + 2 * margin) / last, 2 * magnitude / most) + least
    scales = scales.clip(max=most).astype(dtype)
    wide = scales.astype(w.dtype)
    zeros = ((margin - smallest) / wide).astype(dtype)
    codes = jnp.round(w / wide[..., None] + zeros.astype(w.dtype)[..., None]).clip(0, last)
    return codes.astype(jnp.uint32), (wide * factor).clip(max=most).astype(dtype), zeros


def _moderate(w: Array) -> tuple[Array, Array]:
    """Groups, and factors by which their scales are to be multiplied: 2^16 for groups that are 2^−16 of what they were.

    The sum of two of the largest floats is infinite, and the reciprocal, by which XLA divides a group, is 0 on a CPU.
    """
    is_large = jnp.abs(w).max(-1) > float(jnp.finfo(w.dtype).max) * 2.0**-8
    return jnp.where(is_large[..., None], w * 2.0**-16, w), jnp.where(is_large, 2.0**16, 1.0).astype(w.dtype)


def _or_one(scales: Array) -> Array:
    """The scales, with 1 in the place of 0, as groups of zeros are divided by them, too."""
    return jnp.where(scales == 0, jnp.ones((), scales.dtype), scales)


def _exponents(scales: Array, of: Format) -> Array:
    """The least e with scale ≤ 2^e, as an int8 stored in a uint8."""
    del of
    mantissa, exponent = jnp.frexp(scales)
    exponent = (exponent - (mantissa == 0.5)).clip(-126, 127)
    return lax.bitcast_convert_type(exponent.astype(jnp.int8), jnp.uint8)


def _scales_of_nvfp(scales: Array, of: Format) -> Array:
    """The nearest nonzero e4m3, so that small weights keep the exponents of their codes.

    For codes of 8 bits it is the next larger one, so that the largest weight is not cut off; they lose nothing by it.
    """
    scales = scales.clip(_SMALLEST_E4M3, LARGEST_E4M3)
    found = lax.bitcast_convert_type(scales.astype(jnp.float8_e4m3fn), jnp.uint8)
    return found if of.bits == 4 else found + (_e4m3(found, scales.dtype) < scales).astype(jnp.uint8)


def _nearest_nf4(x: Array) -> Array:
    return sum((x > (a + b) / 2).astype(jnp.uint32) for a, b in pairwise(NF4))


def _nearest_e2m1(x: Array) -> Array:
    """The code of the nearest e2m1; of two equally near ones the even code, as float types round."""
    between = [(a + b) / 2 for a, b in pairwise(E2M1)]
    magnitude = jnp.abs(x)
    above = [magnitude > a if i % 2 == 0 else magnitude >= a for i, a in enumerate(between)]
    return sum(is_above.astype(jnp.uint32) for is_above in above) | (jnp.signbit(x).astype(jnp.uint32) << 3)


def _nearest_e4m3(x: Array) -> Array:
    codes = x.clip(-LARGEST_E4M3, LARGEST_E4M3).astype(jnp.float8_e4m3fn)
    return lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.uint32)
