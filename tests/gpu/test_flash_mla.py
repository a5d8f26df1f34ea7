"""flash_mla on a GPU at the sizes of DeepSeek-V3: forward, all five gradients and tangents against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.kernels._xla.flash_mla import reference
from ejkernel.primitives.flash_mla import Operands
from ejkernel.types import Platform
from tests.kernels.against_xla import implementation
from tests.kernels.latents import deepseek

from .attention_cases import all_excess, check_all, error, like
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
    return computed_by(
        [implementation("flash_mla" + suffix, platform, "gpu") for suffix in ("", "_jvp", "_bwd")], x, spec
    )


def absorbed(platform):
    """The forward of a platform by which queries attend to the latents, the first of its implementations."""
    entries = kernel_registry.list_implementations("flash_mla")
    return next(e.implementation for e in entries if (e.platform, e.backend) == (platform, "gpu"))


def computed_by(implementations, x, spec):
    """The same of a forward, a tangent and a backward."""
    forward, tangent, backward = implementations
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


FEW = [(Platform.TRITON, 1), (Platform.TRITON, 4), (Platform.PALLAS, 1), (Platform.PALLAS, 4), (Platform.PALLAS, 100)]


@pytest.mark.parametrize("family", ("normal", "large", "peaked", "uniform"))
@pytest.mark.parametrize("platform, queries", FEW)
def test_few_queries(platform, queries, family):
    """They attend to the latents; the derivatives are given their o and lse, those of Triton with less than 64."""
    x, spec = inputs(jnp.bfloat16, family)
    x, of_derivatives = x._replace(q=x.q[:, -queries:]), Platform.TRITON if queries < 64 else platform
    derivatives = [implementation("flash_mla" + suffix, of_derivatives, "gpu") for suffix in ("_jvp", "_bwd")]
    results, cotangents, tangents = computed_by([absorbed(platform), *derivatives], x, spec)
    oracle, in_dtype = (formula(x, spec, cotangents, tangents, kind) for kind in (jnp.float64, jnp.bfloat16))
    check_all(results, oracle, in_dtype)


@pytest.mark.parametrize("sizes", ((1, 8192, 128), (4, 4096, 16), (16, 4096, 128), (3, 2048, 5)), ids=str)
@pytest.mark.parametrize(
    "options", ({}, dict(window=(1000, None), softcap=20.0)), ids=("all", "window, softcap, sinks")
)
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16), ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("platform", (Platform.TRITON, Platform.PALLAS))
def test_decoding(platform, dtype, options, sizes):
    """Queries, keys and heads of a step, in the configs that may be best; latents that no query sees hold NaN."""
    x, spec, poisoned = decoding(dtype, options, *sizes)
    forward = absorbed(platform)
    if reason := forward.supports(spec, x, TARGET):
        pytest.skip(reason)
    oracle, rounded = (outputs(x, spec, kind) for kind in (jnp.float64, dtype))
    errors = {name: error(a, oracle[name]) for name, a in rounded.items()}
    for config in forward.space(spec, x, TARGET)[:3]:
        run = jax.jit(partial(lambda config, x: forward(*x, spec=spec, config=config), config))
        found = run(poisoned)
        over = all_excess(found._asdict(), oracle, errors)
        assert not over, (config, over)
        jax.tree.map(np.testing.assert_array_equal, run(poisoned), found)


def decoding(dtype, options, queries, keys, heads):
    """The operands of a step of one sequence, with sinks if there are options, and its spec; and these with NaN."""
    x, spec = deepseek(1, keys, heads, dtype, **options)
    x = x._replace(q=jax.ShapeDtypeStruct((1, queries, heads, 192), dtype))
    x = x._replace(sinks=jax.ShapeDtypeStruct((1, heads, 2), jnp.float32) if options else None)
    x = like(x, 3)
    x = x._replace(**{name: (getattr(x, name) * 512**-0.5).astype(dtype) for name in ("w_kc", "w_vc")})
    hidden = max(0, keys - queries - spec.window[0]) if spec.window[0] is not None else 0
    poison = lambda a: a.at[:, :hidden].set(jnp.nan)
    return x, spec, x._replace(kv_latent=poison(x.kv_latent), k_rope=poison(x.k_rope))


def outputs(x, spec, dtype):
    """The formula's o and lse by name, computed in `dtype` on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(dtype == jnp.float64):
        to = lambda a: jnp.asarray(np.asarray(a), a.dtype if dtype != jnp.float64 else dtype)
        found = jax.jit(lambda x: reference(*x, spec=spec))(jax.tree.map(to, x))
        return {name: np.asarray(a) for name, a in found._asdict().items()}


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
