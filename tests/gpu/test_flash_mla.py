"""flash_mla on a GPU at the sizes of DeepSeek-V3: forward, all five gradients and tangents against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.kernels._xla.flash_mla import reference
from ejkernel.primitives.flash_mla import Operands
from ejkernel.types import Platform
from tests.kernels.latents import deepseek

from .attention_cases import check_all, like
from .device import TARGET

pytestmark = pytest.mark.gpu
NAMES = ("q", "kv_latent", "k_rope", "w_kc", "w_vc")
TOKENS = 512


def inputs(dtype, family="normal", **options):
    """Operands whose projections preserve the size of a latent, and the spec."""
    x, spec = deepseek(batch=2, tokens=TOKENS, dtype=dtype, **options)
    x = like(x, 0)
    x = x._replace(**{n: (getattr(x, n) * 512**-0.5).astype(dtype) for n in ("w_kc", "w_vc")})
    scaled = {"normal": 1, "large": 30, "uniform": 1e-3}.get(family, 1)
    x = x._replace(q=(x.q * scaled).astype(dtype))
    if family == "peaked":
        x = x._replace(kv_latent=like(x.kv_latent, 5) * 6, k_rope=like(x.k_rope, 6) * 6)
    return x, spec


def formula(x, spec, cotangents, tangents, dtype):
    """The formula's outputs, gradients and tangents, all computed in `dtype`, on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(dtype == jnp.float64):
        to = lambda tree: jax.tree.map(lambda a: jnp.asarray(np.asarray(a), dtype), tree)
        moving, cotangents, tangents = (to(t) for t in (dict(zip(NAMES, x[:5], strict=True)), cotangents, tangents))
        of = lambda moving: reference(*Operands(**moving), spec=spec)
        outputs, pull = jax.vjp(of, moving)
        cotangents = jax.tree.map(lambda a, b: a.astype(b.dtype), cotangents, outputs)
        found = outputs, *pull(cotangents), jax.jvp(of, (moving,), (tangents,))[1]
        return jax.tree.map(np.asarray, found)


def computed(platform, x, spec):
    """(outputs, gradients by name, tangents) of a platform, and the cotangents and tangents that they were given."""
    forward, tangent, backward = (
        kernel_registry.find("flash_mla" + suffix, platform, "gpu").implementation for suffix in ("", "_jvp", "_bwd")
    )
    for f in (forward, tangent, backward):
        if reason := f.supports(spec, x, TARGET):
            pytest.skip(reason)
    config = lambda f: f.heuristic(spec, x, TARGET)
    outputs = jax.jit(lambda x: forward(*x, spec=spec, config=config(forward)))(x)
    cotangents, tangents = like(outputs, 1), like(Operands(*x[:5]), 2)
    gradients = jax.jit(lambda *a: backward(*a, wrt=NAMES, spec=spec, config=config(backward)))(x, outputs, cotangents)
    moved = jax.jit(lambda *a: tangent(*a, spec=spec, config=config(tangent)))(x, outputs, tangents)
    tangents = dict(zip(NAMES, tangents[:5], strict=True))
    return (outputs, dict(zip(NAMES, gradients, strict=True)), moved), cotangents, tangents


@pytest.mark.parametrize("family", ("normal", "large", "peaked", "uniform"))
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16), ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("platform", (Platform.TRITON, Platform.PALLAS))
def test_against_float64(platform, dtype, family):
    x, spec = inputs(dtype, family)
    results, cotangents, tangents = computed(platform, x, spec)
    oracle, in_dtype = (formula(x, spec, cotangents, tangents, kind) for kind in (jnp.float64, dtype))
    check_all(results, oracle, in_dtype)


def test_float32():
    x, spec = inputs(jnp.float32)
    results, cotangents, tangents = computed(Platform.TRITON, x, spec)
    check_all(results, *(formula(x, spec, cotangents, tangents, kind) for kind in (jnp.float64, jnp.float32)))


@pytest.mark.parametrize("platform", (Platform.TRITON, Platform.PALLAS))
def test_invisible_latents_may_be_nan(platform):
    """Those of padding, for results, gradients and tangents."""
    x, spec = inputs(jnp.bfloat16)
    ids = jnp.where(jnp.arange(TOKENS) < 300, 0, -1)[None].repeat(2, 0).astype(jnp.int32)
    padded = x._replace(q_segment_ids=ids, kv_segment_ids=ids)
    poison = lambda a: jnp.where((ids >= 0)[..., None], a, jnp.nan)
    poisoned = padded._replace(kv_latent=poison(x.kv_latent), k_rope=poison(x.k_rope))
    found, wanted = (computed(platform, of, spec)[0] for of in (poisoned, padded))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(*(np.asarray(c, np.float32) for c in (a, b)), rtol=1e-2, atol=1e-2)


def test_reruns_give_the_same_bits():
    x, spec = inputs(jnp.bfloat16, deterministic=True)
    first, second = (computed(Platform.TRITON, x, spec)[0] for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
