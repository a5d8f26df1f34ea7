"""quantized_matmul on a GPU: Triton's kernel and XLA against float64, in four families, with gradients and reruns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import quantization
from ejkernel.kernels._triton.quantized_matmul import configs
from ejkernel.modules._operation import types_of_call
from ejkernel.ops.utils.devices import device_target
from ejkernel.primitives.quantized_matmul import Operands

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(0)
FAMILIES = {
    "normal": lambda shape: RNG.standard_normal(shape),
    "large": lambda shape: 30 * RNG.standard_normal(shape),
    "one_hot": lambda shape: np.eye(shape[-1])[RNG.integers(shape[-1], size=shape[:-1])],
    "long_uniform": lambda shape: 1 + 1e-3 * RNG.standard_normal(shape),
}
# Sizes that fill tiles, and sizes that do not: (rows, features, columns).
SIZES = ((1, 4096, 4096), (16, 2048, 11008), (5, 320, 192), (64, 1024, 1024), (200, 1024, 1024))


def error(found, exact):
    return np.linalg.norm(np.asarray(found, np.float64) - exact)


@pytest.mark.parametrize("platform", ("triton", "xla"))
@pytest.mark.parametrize("transpose", (False, True))
@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_against_float64(size, family, bits, transpose, platform):
    """The error is at most 2 times that of the dense matrix in the dtype of x forward, and 3 times backward."""
    rows, features, columns = size
    of = dict(bits=bits, group_size=64)
    if platform == "triton" and rows > 64:
        pytest.skip("more rows than the kernel takes")
    x = jnp.asarray(FAMILIES[family]((rows, features)), jnp.bfloat16)
    w = jnp.asarray(RNG.standard_normal((columns, features) if transpose else (features, columns)), jnp.bfloat16)
    packed = quantization.quantize(w, axis="col", **of)
    dense = quantization.dequantize(*packed, **of)
    dense = dense.T if transpose else dense
    exact = np.asarray(dense, np.float64)
    do = jnp.asarray(RNG.standard_normal((rows, columns)), jnp.bfloat16)

    def both(f):
        def run(x):
            o, pull = jax.vjp(f, x)
            return o, pull(do)[0]

        return jax.jit(run)(x)

    call = lambda x: ejkernel.modules.quantized_matmul(x, *packed, **of, transpose=transpose, platform=platform)
    formula = lambda x: jnp.dot(x, dense.astype(x.dtype), preferred_element_type=jnp.float32).astype(x.dtype)
    wide, wide_do = np.asarray(x, np.float64), np.asarray(do, np.float64)
    found, plain, again = both(call), both(formula), both(call)
    for a, b, c, wanted, factor in zip(found, plain, again, (wide @ exact, wide_do @ exact.T), (2, 3), strict=True):
        least = error(np.asarray(jnp.asarray(wanted, jnp.bfloat16)), wanted)
        assert error(a, wanted) <= factor * max(error(b, wanted), least)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(c))


@pytest.mark.parametrize("transpose", (False, True))
@pytest.mark.parametrize("bits", (2, 4, 8))
def test_examples_of_a_vmap(bits, transpose):
    """The examples are 35 rows of one product, whose config is that of an example of 7."""
    x = jnp.asarray(RNG.standard_normal((5, 7, 16)), jnp.bfloat16)
    packed = quantization.quantize(jnp.asarray(RNG.standard_normal((16, 16)), jnp.bfloat16), bits=bits, group_size=16)
    of = dict(bits=bits, group_size=16, transpose=transpose)
    product = ejkernel.modules.quantized_matmul
    run = lambda platform: jax.jit(jax.vmap(lambda x: product(x, *packed, **of, platform=platform)))(x)
    found, wanted = (np.asarray(run(platform), np.float64) for platform in ("triton", "xla"))
    assert error(found, wanted) <= 2 * float(jnp.finfo(jnp.bfloat16).eps) * np.linalg.norm(wanted)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("bits", (2, 4, 8))
@pytest.mark.parametrize("group", (16, 64))
@pytest.mark.parametrize(
    "size", ((1, 4096, 4096), (3, 50, 192), (8, 1000, 64), (16, 2048, 11008), (20, 320, 192)), ids=str
)
def test_every_config_for_few_rows(size, group, bits, dtype):
    """Codes that become numbers in registers, and the others, with zeros between codes: at most 2 times the error."""
    rows, features, columns = size
    of = dict(bits=bits, group_size=group)
    array = lambda low, high, shape: jnp.asarray(RNG.uniform(low, high, shape), dtype)
    codes = jnp.asarray(RNG.integers(0, 2**32, (features, columns * bits // 32), np.uint32))
    groups = (features, columns // group)
    packed = codes, array(0.005, 0.05, groups), array(0, 2**bits, groups)
    x = jnp.asarray(RNG.standard_normal((rows, features)), dtype)
    dense = quantization.dequantize(*packed, **of)
    exact = np.asarray(x, np.float64) @ np.asarray(dense, np.float64)
    formula = jnp.dot(x, dense.astype(x.dtype), preferred_element_type=jnp.float32).astype(x.dtype)
    named, spec = types_of_call("quantized_matmul", x=x, w=packed[0], scales=packed[1], zeros=packed[2], **of)
    space = configs.space("quantized_matmul", Operands(**named), spec, device_target())
    assert any(config.algorithm == "registers" for config in space)
    for config in space:
        found = jax.jit(lambda x, *a, config=config: ejkernel.lax.quantized_matmul(x, *a, **of, config=config))(
            x, *packed
        )
        assert error(found, exact) <= 2 * error(formula, exact), str(config)
