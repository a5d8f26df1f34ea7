"""Wrong calls raise while they are traced, with the operation, the operand, the numbers and the rule."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel import quantization

pytestmark = pytest.mark.core


def array_of(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


f32, u8, u32 = (partial(array_of, dtype) for dtype in (jnp.float32, jnp.uint8, jnp.uint32))
GOOD = dict(x=f32(5, 96), w=u32(96, 16), scales=f32(96, 2), zeros=f32(96, 2))

WRONG = {
    "rank of x": (dict(x=f32(96)), ValueError, "x has 1 axes; it must have 2, rows and features, or 3 with a batch"),
    "rank of w": (dict(w=u32(16)), ValueError, "w has 1 axes; it must have 2: rows, words"),
    "codes": (dict(w=array_of(jnp.int32, 96, 16)), ValueError, "w is int32; it must be uint32, words of packed codes"),
    "integers": (dict(x=u8(5, 96)), TypeError, "x has dtype uint8; it must be a float type"),
    "features": (dict(x=f32(5, 64)), ValueError, "x has 64 features but w has rows for 96; they must be equal"),
    "features of groups": (
        dict(transpose=True),
        ValueError,
        "x has 96 features but groups of w have 128; they must be equal",
        "(x: f32[5,96], w: u32[96,16], scales: f32[96,2])",
    ),
    "no rows": (
        dict(x=f32(5, 0), w=u32(0, 16), scales=f32(0, 2), zeros=f32(0, 2)),
        ValueError,
        "w has 0 rows; it must have some",
    ),
    "part of a group": (
        dict(w=u32(96, 12)),
        ValueError,
        "w has 12 words in a row but a group of 64 codes of 4 bits has 8; these must divide that",
    ),
    "scales": (dict(scales=f32(96, 4)), ValueError, "scales must be [96, 2]: one for each group of 64 codes of 4 bits"),
    "zeros": (dict(zeros=f32(1, 2)), ValueError, "zeros must be [96, 2]: one for each group of 64 codes of 4 bits"),
    "no zeros": (dict(zeros=None), ValueError, "zeros are missing; mode affine has one for each scale"),
    "zeros of nf4": (dict(mode="nf4"), ValueError, "zeros are given; mode nf4 has none"),
    "zeros of uint8": (dict(zeros=u8(96, 2)), TypeError, "zeros is uint8; it must be one of float16, bfloat16"),
    "scales of uint8": (dict(scales=u8(96, 2)), TypeError, "scales is uint8; it must be one of float16, bfloat16"),
    "float scales": (
        dict(mode="mxfp4", zeros=None),
        TypeError,
        "scales is float32; it must be uint8 in mode mxfp4",
    ),
    "mode": (
        dict(mode="int4"),
        ValueError,
        "mode is 'int4'; it must be one of affine, nf4, mxfp4, mxfp8, nvfp4, nvfp8",
    ),
    "bits": (dict(bits=9), ValueError, "bits is 9; mode affine has one of 1, 2, 3, 4, 5, 6, 7, 8"),
    "bits of a mode": (dict(mode="mxfp4", bits=8), ValueError, "bits is 8; mode mxfp4 has 4"),
    "group": (
        dict(group_size=48),
        ValueError,
        "group_size is 48; mode affine has one of 16, 32, 64, 128, 256, 512, 1024",
    ),
    "group of a mode": (dict(mode="nvfp4", group_size=32), ValueError, "group_size is 32; mode nvfp4 has 16"),
    "group of words": (
        dict(bits=3, group_size=16),
        ValueError,
        "group_size is 16 with 3 bits; it must be a multiple of 32, so that the codes of a group fill whole words",
    ),
    "true bits": (dict(bits=True), TypeError, "bits is True; it must be an int or None"),
    "transposed by a number": (dict(transpose=1), TypeError, "transpose must be True or False, not int"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    changed, kind, *parts = WRONG[name]
    call = GOOD | changed
    static = {n: x for n, x in call.items() if not isinstance(x, jax.ShapeDtypeStruct)}
    arrays = {n: x for n, x in call.items() if n not in static}
    with pytest.raises(kind) as raised:
        jax.eval_shape(lambda of: ejkernel.lax.quantized_matmul(**of, **static), arrays)
    for part in ("quantized_matmul: ", *parts):
        assert part in str(raised.value), str(raised.value)


def test_the_codes_have_no_derivative():
    """Like all integers in JAX; nor do scales of uint8."""
    arrays = dict(GOOD, scales=u8(96, 4), w=u32(96, 16))
    del arrays["zeros"]
    f = lambda scales: ejkernel.lax.quantized_matmul(
        jnp.zeros((5, 96)), jnp.zeros((96, 16), "uint32"), scales, mode="mxfp4"
    ).sum()
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        jax.eval_shape(jax.grad(f), arrays["scales"])


WEIGHTS = {
    "rank": (
        lambda: quantization.quantize(jnp.ones(64)),
        ValueError,
        "quantize: w has 1 axes; it must have at least 2",
    ),
    "integers": (
        lambda: quantization.quantize(jnp.ones((64, 64), jnp.int32)),
        TypeError,
        "quantize: w is int32; it must be one of float16, bfloat16, float32, float64",
    ),
    "no array": (lambda: quantization.quantize([[1.0]]), TypeError, "quantize: w must be an array, not list"),
    "rows": (
        lambda: quantization.quantize(jnp.ones((96, 64))),
        ValueError,
        "quantize: group_size is 64 but axis 'row' of w has 96 entries; it should divide them (axis='col' groups",
    ),
    "columns": (
        lambda: quantization.quantize(jnp.ones((64, 24)), mode="nvfp4", axis="col"),
        ValueError,
        "quantize: group_size is 16 but axis 'col' of w has 24 entries",
    ),
    "axis": (lambda: quantization.quantize(jnp.ones((64, 64)), axis=0), ValueError, "axis is 0; it must be 'row' or"),
    "codes": (
        lambda: quantization.dequantize(jnp.ones((4, 8)), jnp.ones((4, 1)), mode="nf4"),
        TypeError,
        "dequantize: w is float32; it must be uint32",
    ),
    "scales": (
        lambda: quantization.dequantize(jnp.ones((4, 8), jnp.uint32), jnp.ones((4, 2)), mode="nf4"),
        ValueError,
        "dequantize: scales must be [4, 1]: one for each group of 64 codes of 4 bits",
    ),
    **{
        f"dtype {dtype}": (
            lambda dtype=dtype: quantization.dequantize(
                jnp.ones((4, 8), jnp.uint32), jnp.ones((4, 1)), mode="nf4", dtype=dtype
            ),
            TypeError,
            f"dequantize: dtype is {dtype!r}; it must be a float type",
        )
        for dtype in (None, "int8", "f99", 32)
    },
    "an array as axis": (
        lambda: quantization.quantize(jnp.ones((64, 64)), axis=jnp.ones(2)),
        ValueError,
        "quantize: axis is Array([1., 1.], dtype=float32); it must be 'row' or 'col'",
    ),
    "transpose": (
        lambda: quantization.prepack_quantized_weights(jnp.ones((64, 64)), transpose="x"),
        TypeError,
        "prepack_quantized_weights: transpose is 'x'; it must be True or False",
    ),
    "axis of prepacked": (
        lambda: quantization.prepack_quantized_weights(jnp.ones((64, 64)), axis=0),
        ValueError,
        "prepack_quantized_weights: axis is 0; it must be 'row' or",
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_wrong_weights(name):
    call, kind, message = WEIGHTS[name]
    with pytest.raises(kind) as raised:
        call()
    assert message in str(raised.value)
