"""Weights quantised and dequantised in every mode: layouts, nearest codes, and extreme values."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fuzz.formulas.quantized_matmul import numbers_of_codes, numbers_of_scales

from ejkernel import quantization
from ejkernel.quantization import format_of

FORMAT = ("group_size", "bits", "mode", "axis")
quantize = jax.jit(quantization.quantize, static_argnames=FORMAT)
dequantize = jax.jit(quantization.dequantize, static_argnames=(*FORMAT, "dtype"))
prepack = jax.jit(quantization.prepack_quantized_weights, static_argnames=(*FORMAT, "transpose"))

FORMATS = [
    *(dict(mode="affine", bits=bits, group_size=32) for bits in range(1, 9)),
    dict(mode="affine", bits=2, group_size=16),
    dict(mode="nf4", group_size=128),
    *(dict(mode=mode) for mode in ("mxfp4", "mxfp8", "nvfp4", "nvfp8")),
]
each_format = pytest.mark.parametrize("of", FORMATS, ids=lambda of: "-".join(map(str, of.values())))
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def weights(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def exact(w, scales, zeros=None, *, group_size=None, bits=None, mode):
    """The values of codes and scales, in float64, decoded bit by bit."""
    of = format_of("test", mode, bits, group_size)
    options = dict(mode=mode, bits=of.bits)
    values = numbers_of_codes(np.asarray(w), options, scales.shape[-1] * of.group_size)
    spread = lambda a: np.repeat(np.asarray(a, np.float64), of.group_size, -1)
    scales = scales if of.has_float_scales else numbers_of_scales(np.asarray(scales), options)
    return (values - (0 if zeros is None else spread(zeros))) * spread(scales)


@each_format
def test_dequantised_values_are_those_of_the_bits(of):
    packed = quantize(jnp.asarray(weights(4, 128), jnp.float32), axis="col", **of)
    found = format_of("test", of["mode"], of.get("bits"), of.get("group_size"))
    assert packed[0].shape == (4, 4 * found.bits) and packed[0].dtype == jnp.uint32
    for x in packed[1:]:
        assert x.shape == (4, 128 // found.group_size)
        assert x.dtype == (jnp.float32 if found.has_float_scales else jnp.uint8)
    assert len(packed) == (3 if of["mode"] == "affine" else 2)
    wanted = exact(*packed, **of)
    np.testing.assert_allclose(dequantize(*packed, **of), wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


def values(of, scale, zero):
    """The values that codes of a group can represent, in order."""
    if of.mode == "affine":
        return (np.arange(2**of.bits) - zero) * scale
    codes = np.arange(2**of.bits, dtype=np.uint32)
    numbers = numbers_of_codes((codes << 0)[:, None], dict(mode=of.mode, bits=of.bits), 32 // of.bits)[:, 0]
    return np.sort(numbers[np.isfinite(numbers)]) * scale


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: x.__name__)
def test_every_weight_gets_the_nearest_code(of, dtype):
    """Of those that the stored scale of its group allows."""
    w = jnp.asarray(weights(4, 128, seed=3) * 0.02, dtype)
    found = format_of("test", of["mode"], of.get("bits"), of.get("group_size"))
    packed = quantize(w, axis="col", **of)
    back = np.asarray(exact(*packed, **of)).reshape(4, -1, found.group_size)
    groups = np.asarray(w, np.float64).reshape(back.shape)
    scales = packed[1] if found.has_float_scales else numbers_of_scales(np.asarray(packed[1]), dict(mode=found.mode))
    scales, zeros = (
        np.asarray(scales, np.float64),
        np.asarray(packed[2] if len(packed) == 3 else 0 * scales, np.float64),
    )
    for at in np.ndindex(scales.shape):
        nearest = np.abs(groups[at][:, None] - values(found, scales[at], zeros[at])).min(-1)
        np.testing.assert_allclose(np.abs(groups[at] - back[at]), nearest, atol=1e-6 * np.abs(groups[at]).max())


# The largest error of a weight relative to the largest of its group: half of the widest gap between two codes; the
# scale of mxfp is up to twice as large as necessary; the scales of nvfp are rounded, and clip by at most that much.
LARGEST = dict(nf4=0.153, mxfp4=2 / 6, mxfp8=32 / 448, nvfp4=1 / 6 + 0.07, nvfp8=1 / 14)


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: x.__name__)
def test_largest_error(of, dtype):
    for size in (1e-3, 0.02, 1.0, 100.0):
        check_nearness(of, dtype, jnp.asarray(weights(4, 128, seed=3) * size, dtype))


def check_nearness(of, dtype, w):
    back = np.asarray(dequantize(*quantize(w, axis="col", **of), **of), np.float64)
    group = format_of("test", of["mode"], of.get("bits"), of.get("group_size")).group_size
    groups = np.asarray(w, np.float64).reshape(4, -1, group)
    error = np.abs(back.reshape(groups.shape) - groups).max(-1)
    if of["mode"] == "affine":  # half a step, and the rounding of scale and zero
        allowed = np.ptp(groups, axis=-1) / (2 ** of["bits"] - 1) / 2
        allowed = allowed * 1.01 + 1.5 * float(jnp.finfo(dtype).eps) * np.abs(groups).max(-1)
    else:
        allowed = LARGEST[of["mode"]] * np.abs(groups).max(-1)
        if of["mode"].startswith("nvfp4"):  # whose scales are not below 2^-9
            allowed = np.maximum(allowed, 2.0**-9)
    assert (error <= allowed).all(), (error / allowed).max()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: x.__name__)
@pytest.mark.parametrize("bits", (1, 2, 4, 8))
@pytest.mark.parametrize("group", ([0.0], [3.0], [-5e-4], [1000.0, 1000.5], [-200.0, -199.0], [0.0, 1e-7], [6e4, -6e4]))
def test_extremes_of_affine(dtype, bits, group):
    """Groups of zeros, of one value, far from 0, and very small: finite, and as near as the dtype allows."""
    w = jnp.asarray(np.resize(group, (1, 16 * 4)), dtype)
    packed = quantize(w, group_size=32, bits=bits, axis="col")
    back = np.asarray(dequantize(*packed, group_size=32, bits=bits), np.float64)
    assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in packed)
    wide = np.asarray(w, np.float64)
    step, margin = np.ptp(wide) / (2**bits - 1) / 2, 4 * float(jnp.finfo(dtype).eps) * np.abs(wide).max()
    assert (np.abs(back - wide) <= 1.05 * step + margin + 1e-7).all()


@pytest.mark.parametrize("of", [of for of in FORMATS if not of["mode"].startswith("nvfp")], ids=lambda of: str(of))
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: x.__name__)
def test_the_largest_floats(of, dtype):
    """Finite in the dtype of the weights, as near as other weights are, or as near as a finite value is."""
    largest = float(jnp.finfo(dtype).max)
    w = np.stack([weights(128, seed=3).clip(-1, 1), np.resize([1, -1, 0.5, 0], 128), np.resize([1, 0.99], 128)])
    w = w / 2 if of.get("bits") == 1 else w
    w = jnp.asarray((w * largest).clip(-largest, largest), dtype)
    found = format_of("test", of["mode"], of.get("bits"), of.get("group_size"))
    for call in (quantize, quantization.quantize):
        packed = call(w, axis="col", **of)
        back = np.asarray(dequantize(*packed, dtype=np.dtype(dtype), **of), np.float64)
        wide = np.asarray(w, np.float64)
        if of["mode"] == "affine":
            step = np.ptp(wide / 2, axis=-1) / (2 ** of["bits"] - 1)
            allowed = 1.01 * step + 6 * float(jnp.finfo(dtype).eps) * largest
        else:  # of mxfp, the largest are cut off at 1.5 and 1.875 times a power of two
            allowed = np.full(3, dict(nf4=0.153, mxfp4=0.25, mxfp8=1 / 14)[found.mode] * largest)
        assert np.isfinite(back).all()
        assert (np.abs(back - wide).max(-1) <= allowed).all(), np.abs(back - wide).max(-1) / allowed


@pytest.mark.parametrize("mode", ("nf4", "mxfp4", "mxfp8", "nvfp4", "nvfp8"))
def test_zeros_stay_zeros(mode):
    assert not np.asarray(dequantize(*quantize(jnp.zeros((2, 64)), mode=mode, axis="col"), mode=mode)).any()


def test_float_codes_are_those_of_ml_dtypes():
    """All numbers of e2m1 and e4m3, and midpoints, rounded to even codes."""
    for mode, kind in (("mxfp4", ml_dtypes.float4_e2m1fn), ("mxfp8", ml_dtypes.float8_e4m3fn)):
        largest = float(ml_dtypes.finfo(kind).max)
        w = np.concatenate([[largest], np.linspace(-largest, largest, 2047)]).reshape(-1, 32).astype(np.float32)
        w[:, 0] = largest  # so that every scale is 1
        back = dequantize(*quantize(jnp.asarray(w), mode=mode, axis="col"), mode=mode)
        np.testing.assert_array_equal(back, w.astype(kind).astype(np.float32))


# --- Layouts ----------------------------------------------------------------------------------------------------------


def test_words_begin_with_their_lowest_bits():
    w = jnp.asarray(np.arange(16.0)[None].repeat(2, 1).reshape(1, 32))
    codes, scales, zeros = quantize(w[:, ::2], group_size=16, axis="col")
    np.testing.assert_array_equal(codes, np.array([[0x76543210, 0xFEDCBA98]], np.uint32))
    np.testing.assert_allclose((np.arange(16) - zeros) * scales, np.arange(16.0)[None], atol=1e-4)


@each_format
def test_axes(of):
    """axis="row" packs the transposed matrix, and the inverse transposes back; leading axes are a batch of matrices."""
    w = jnp.asarray(weights(3, 128, 256), jnp.float32)
    rows, columns = quantize(w, axis="row", **of), quantize(w.swapaxes(1, 2), axis="col", **of)
    for a, b in zip(rows, columns, strict=True):
        np.testing.assert_array_equal(a, b)
    assert dequantize(*rows, axis="row", **of).shape == w.shape
    np.testing.assert_array_equal(dequantize(*rows, axis="row", **of), dequantize(*rows, **of).swapaxes(1, 2))
    one = quantize(w[1], **of)
    for a, b in zip(rows, one, strict=True):
        np.testing.assert_array_equal(a[1], b)


def test_prepacked_weights():
    """[K, N] with transpose=False, [N, K] with transpose=True; `axis` takes precedence."""
    w = jnp.asarray(weights(128, 256), jnp.float32)
    same = lambda a, b: [np.testing.assert_array_equal(x, y) for x, y in zip(a, b, strict=True)]
    same(prepack(w, mode="nf4", transpose=False), prepack(w.T, mode="nf4", transpose=True))
    same(prepack(w, mode="nf4", axis="col"), quantize(w, mode="nf4", axis="col"))
    assert prepack(w, group_size=64, bits=4, transpose=False)[0].shape == (128, 32)


def test_dtype_of_the_result():
    packed = quantize(jnp.asarray(weights(4, 64), jnp.bfloat16), mode="nf4", axis="col")
    assert dequantize(*packed, mode="nf4").dtype == jnp.float32
    assert dequantize(*packed, mode="nf4", dtype=jnp.bfloat16).dtype == jnp.bfloat16
