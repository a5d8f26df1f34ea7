"""flash_attention in Mosaic GPU on a Hopper GPU: every feature it takes against the formula in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention import (
    flash_attention,
    flash_attention_bwd,
    flash_attention_jvp,
    supports,
    supports_bwd,
    supports_jvp,
)
from ejkernel.kernels._pallas.gpu.flash_attention.configs import space
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Outputs

from .attention_cases import CASES, CAUSAL, Case, check, derivatives, differentiable, like, poisoned
from .test_flash_attention import DEVICE_KIND, TARGET

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE_KIND is None or TARGET.compute_capability != 90, reason="there is no Hopper GPU"),
]
FITTING = [replace(case, D=64, V=64) for case in CASES]
TAKEN = [case for case in FITTING if supports(*reversed(case.make(256, jnp.bfloat16)), TARGET) is None]


def compare(case: Case, length: int, dtype, config=None, backward_config=None):
    """The outputs and, where the backward and the tangent take the call, the gradients and the tangents."""
    x, spec = case.make(length, dtype)
    assert supports(spec, x, TARGET) is None
    wrt, tangents = differentiable(x), {name: like(getattr(x, name), 1) for name in differentiable(x)}
    config = config or space("flash_attention", x, spec, TARGET)[0]
    outputs = jax.jit(lambda x: flash_attention(*x, spec=spec, config=config))(poisoned(x, spec))
    cotangents = like(outputs, 2)
    (exact, exact_gradients, exact_moved), (rounded, rounded_gradients, rounded_moved) = (
        derivatives(x, spec, cotangents, tangents, precision) for precision in (jnp.float64, dtype)
    )
    for name, *arrays in zip(Outputs._fields, outputs, exact, rounded, strict=True):
        check(name, *arrays, factor=2, rounding=0)
    lse_rounding = np.abs(exact.lse[np.isfinite(exact.lse)]).max(initial=0) * 2.0**-23
    if supports_jvp(spec, x, TARGET) is None:
        config = space("flash_attention_jvp", x, spec, TARGET)[0]
        moving = x._replace(**{name: tangents.get(name) for name in x._fields})
        moved = jax.jit(lambda *a: flash_attention_jvp(*a, spec=spec, config=config))(
            poisoned(x, spec), outputs, moving
        )
        for name, *arrays in zip(Outputs._fields, moved, exact_moved, rounded_moved, strict=True):
            check(f"{name}_dot", *arrays, 3, lse_rounding)
    if supports_bwd(spec, x, TARGET) is None:
        config = backward_config or space("flash_attention_bwd", x, spec, TARGET)[0]
        backward = jax.jit(lambda *a: flash_attention_bwd(*a, wrt=wrt, spec=spec, config=config))
        for name, gradient in zip(wrt, backward(poisoned(x, spec), outputs, cotangents), strict=True):
            check(f"d{name}", gradient, exact_gradients[name], rounded_gradients[name], 3, lse_rounding)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_feature(case, dtype):
    compare(case, 300, dtype)


@pytest.mark.parametrize("D, V", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_configs_of_feature_sizes(D, V):
    case = Case("sizes", S=0.9, H=4, G=2, D=D, V=V, spec=CAUSAL)
    x, spec = case.make(640, jnp.bfloat16)
    for config in space("flash_attention", x, spec, TARGET):
        compare(case, 640, jnp.bfloat16, config)
    if supports_bwd(spec, x, TARGET) is None:
        for config in space("flash_attention_bwd", x, spec, TARGET):
            compare(case, 640, jnp.bfloat16, backward_config=config)


@pytest.mark.parametrize("window", [(None, None), (700, None), (100, 30)])
def test_long(window):
    """More tiles than the device runs at once, and runs of blocks that wrap around the stages many times."""
    spec = FlashAttentionSpec(causal=window[1] is None, window=window)
    compare(Case("long", B=2, H=8, G=2, D=128, V=128, spec=spec), 2048, jnp.bfloat16)


def test_reruns_give_the_same_bits():
    x, spec = Case("again", H=4, G=2, D=128, V=128, spec=CAUSAL).make(1000, jnp.bfloat16)
    config = space("flash_attention", x, spec, TARGET)[0]
    first, second = (jax.jit(lambda x: flash_attention(*x, spec=spec, config=config))(x) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
