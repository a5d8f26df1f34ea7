"""flash_attention in Mosaic GPU with a scale that is an operand, on a Hopper GPU, against the formula in float64."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention import flash_attention, flash_attention_bwd
from ejkernel.kernels._pallas.gpu.flash_attention.configs import space
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Outputs

from .attention_cases import CAUSAL, Case, check, derivatives, differentiable, like
from .device import ON_HOPPER, TARGET

pytestmark = ON_HOPPER
SCALED = {
    "of the batch": Case("scale", scale="b", H=4, G=2, D=128, V=128, spec=CAUSAL),
    "of heads": Case("scale", scale="h", H=4, G=4, D=64, V=64),
    "with a softcap and a window": Case(
        "scale", scale="bh", D=256, V=256, spec=FlashAttentionSpec(causal=True, window=(90, None), softcap=3.0)
    ),
    "of segments": Case("scale", scale="b", H=4, G=2, D=192, V=128, spec=CAUSAL, segments=True, sinks=1),
    "packed": Case("scale", scale="h", H=2, G=2, D=96, V=96, spec=CAUSAL, packed=True),
}


@pytest.mark.parametrize("factor", [1.0, -1.0, 0.0, 30.0], ids="times {:g}".format)
@pytest.mark.parametrize("name", SCALED)
def test_a_scale_that_is_an_operand(name, factor):
    """Negative ones, and 0, too; and its gradient."""
    x, spec = SCALED[name].make(600, jnp.bfloat16)
    x = x._replace(softmax_scale=factor * x.softmax_scale)
    (B, S, H, _), V, wrt = x.q.shape, x.v.shape[3], differentiable(x)
    o, lse = jax.ShapeDtypeStruct((B, S, H, V), x.q.dtype), jax.ShapeDtypeStruct((B, H, S), jnp.float32)
    cotangents, tangents = like(Outputs(o, lse), 2), {name: like(getattr(x, name), 1) for name in wrt}
    exact, rounded = (derivatives(x, spec, cotangents, tangents, dtype) for dtype in (jnp.float64, jnp.bfloat16))
    (config, *_), (of_gradients, *_) = (space(of, x, spec, TARGET) for of in ("flash_attention", "flash_attention_bwd"))
    found = jax.jit(lambda x: flash_attention(*x, spec=spec, config=config))(x)
    for of, *arrays in zip(Outputs._fields, found, exact[0], rounded[0], strict=True):
        check(of, *arrays, factor=2)
    backward = lambda *a: flash_attention_bwd(*a, wrt=wrt, spec=spec, config=of_gradients)
    for of, gradient in zip(wrt, jax.jit(backward)(x, found, cotangents), strict=True):
        check(f"d{of}", gradient, exact[1][of], rounded[1][of], factor=3)
