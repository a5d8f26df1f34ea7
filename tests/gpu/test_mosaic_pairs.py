"""flash_attention with a bias or a mask on a Hopper GPU: the forward and the backward in Mosaic GPU, and Triton's
derivatives of the same outputs, against the formula in float64.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels._dispatch import select
from ejkernel.kernels._pallas.gpu.flash_attention import (
    flash_attention,
    flash_attention_bwd,
    supports,
    supports_bwd,
)
from ejkernel.kernels._pallas.gpu.flash_attention.configs import space
from ejkernel.kernels._triton import flash_attention as triton
from ejkernel.primitives.flash_attention import FlashAttentionSpec
from ejkernel.types import Platform

from .attention_cases import CAUSAL, Case, check_all, derivatives, differentiable, like, poisoned, poisoned_cotangents
from .device import ON_HOPPER, TARGET

pytestmark = ON_HOPPER
WINDOW = FlashAttentionSpec(causal=True, window=(90, None))
BIASED = dict(bias_dtype=None, H=4, G=2, D=128, V=128)
CASES = [
    Case("bias", bias="hst", **BIASED),
    Case("bias of a batch", bias="bst", **BIASED),
    Case("bias of all", bias="bhst", spec=CAUSAL, **BIASED),
    Case("bias of pairs", bias="st", S=1.3, spec=CAUSAL, **BIASED),
    Case("bias, more keys", bias="hst", S=0.7, K=1.6, spec=CAUSAL, **BIASED),
    Case("bias, window", bias="hst", spec=WINDOW, **BIASED),
    Case("bias, softcap", bias="hst", spec=FlashAttentionSpec(softcap=2.0), **BIASED),
    Case("bias, sinks", bias="hst", sinks=1, **BIASED),
    Case("bias, segments", bias="hst", segments=True, **BIASED),
    Case("bias of −∞", bias="bhst", hidden=0.5, **BIASED),
    Case("bias of −∞, rows", bias="hst", hidden=0.3, empty=True, **BIASED),
    Case("bias of −∞, rows, causal", bias="hst", hidden=0.9, empty=True, spec=CAUSAL, **BIASED),
    Case("bias of −∞, softcap", bias="hst", hidden=0.3, spec=FlashAttentionSpec(softcap=2.0), **BIASED),
    Case("bias of −∞, softcap, window", bias="hst", hidden=0.3, spec=replace(WINDOW, softcap=2.0), **BIASED),
    Case("mask", mask="bst", H=4, G=2),
    Case("mask of all", mask="st", H=4, G=2, spec=CAUSAL),
    Case("mask of heads", mask="hst", S=1.3, K=0.9),
    Case("mask of all pairs", mask="bhst", S=0.7, K=1.3, spec=CAUSAL),
    Case("mask, rows", mask="bst", empty=True, H=4, G=2),
    Case("mask, rows, causal", mask="bhst", empty=True, H=4, G=2, spec=CAUSAL),
    Case("mask, window", mask="bst", spec=WINDOW),
    Case("mask, softcap, sinks", mask="st", sinks=2, spec=FlashAttentionSpec(softcap=2.0)),
    Case("mask, softcap, window", mask="bst", spec=replace(WINDOW, softcap=2.0)),
    Case("mask, segments", mask="bst", segments=True),
    Case("bias, mask", bias="hst", mask="bst", empty=True, spec=CAUSAL, **BIASED),
]


def compare(case: Case, length: int, dtype, configs: slice = slice(1)):
    """The outputs by some configs, gradients by some configs from the first outputs, and Triton's derivatives."""
    x, spec = case.make(length, dtype)
    assert supports(spec, x, TARGET) is supports_bwd(spec, x, TARGET) is None
    wrt, given = differentiable(x), poisoned(x, spec)
    tangents = x._replace(**{name: like(getattr(x, name), 1) if name in wrt else None for name in x._fields})
    forward = lambda config: jax.jit(lambda x: flash_attention(*x, spec=spec, config=config))(given)
    outputs, *others = map(forward, space("flash_attention", x, spec, TARGET)[configs])
    cotangents = like(outputs, 2)
    call = given, outputs, poisoned_cotangents(cotangents, x, spec)
    backward, tangent = (f.heuristic(spec, x, TARGET) for f in (triton.flash_attention_bwd, triton.flash_attention_jvp))
    by = lambda f, config: jax.jit(lambda *a: f(*a, wrt=wrt, spec=spec, config=config))(*call)
    ours = (by(flash_attention_bwd, config) for config in space("flash_attention_bwd", x, spec, TARGET)[configs])
    gradients, *all_ours = (
        dict(zip(wrt, found, strict=True)) for found in (by(triton.flash_attention_bwd, backward), *ours)
    )
    moved = jax.jit(lambda *a: triton.flash_attention_jvp(*a, spec=spec, config=tangent))(
        given, outputs, poisoned(x, spec, tangents)
    )
    exact, rounded = (
        derivatives(x, spec, cotangents, tangents._asdict(), precision) for precision in (jnp.float64, dtype)
    )
    for result in (outputs, *others):
        check_all((result, gradients, moved), exact, rounded)
    for found in all_ours:
        check_all((outputs, found, moved), exact, rounded)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_feature(case, dtype):
    compare(replace(case, D=64, V=64), 320, dtype)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "given", [dict(bias="hst", hidden=0.3), dict(mask="bst"), dict(bias="st", mask="bst")], ids=str
)
@pytest.mark.parametrize("D, V", [(64, 64), (72, 72), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_configs_of_head_dims(D, V, given, causal):
    """Every config; keys that end within a tile, more queries than keys, and more tiles than run at once."""
    case = Case("sizes", S=1.2, H=4, G=2, D=D, V=V, bias_dtype=None, spec=FlashAttentionSpec(causal=causal), **given)
    compare(case, 840, jnp.bfloat16, slice(None))


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("bias", "mask")], ids=lambda case: case.name)
def test_reruns_give_the_same_bits(case):
    x, spec = case.make(1000, jnp.bfloat16)
    (config, *_) = space("flash_attention", x, spec, TARGET)
    run = jax.jit(lambda x: flash_attention(*x, spec=spec, config=config))
    for a, b in zip(run(x), run(x), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("given", [dict(bias="st"), dict(mask="bst"), dict(bias="hst", mask="st")], ids=str)
def test_certain_gradients_are_the_same_bits(given, causal):
    """In several tiles of keys."""
    spec = FlashAttentionSpec(causal=causal, deterministic=True)
    case = Case("certain", S=0.9, H=4, G=2, D=128, V=128, bias_dtype=None, spec=spec, **given)
    compare(case, 1000, jnp.bfloat16)
    x, spec = case.make(1000, jnp.bfloat16)
    wrt, (config, *_) = differentiable(x), space("flash_attention_bwd", x, spec, TARGET)
    outputs = flash_attention(*x, spec=spec, config=space("flash_attention", x, spec, TARGET)[0])
    backward = jax.jit(lambda *a: flash_attention_bwd(*a, wrt=wrt, spec=spec, config=config))
    call = x, outputs, like(outputs, 2)
    first = jax.tree.map(np.asarray, backward(*call))
    for again in [backward(*call) for _ in range(10)]:
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("length", [1024, 1032, 1026])
def test_the_library_has_the_same_gradients_as_triton(length):
    """By the kernels that it chooses; with 1026 keys of a bias, which TMA does not load, all are Triton's."""
    case = Case("learned bias", bias="hst", bias_dtype=None, H=4, G=4, D=64, V=64)
    x, spec = case.make(length, jnp.bfloat16)
    taken = select("flash_attention", spec, x, TARGET).platform
    assert taken == (Platform.TRITON if length % 8 else Platform.PALLAS)

    def gradients(platform):
        f = lambda q, k, v, bias: ejkernel.lax.flash_attention(q, k, v, bias=bias, platform=platform)
        total = lambda *a: (f(*a).astype(jnp.float32) ** 2).sum()
        return jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(x.q, x.k, x.v, x.bias)

    for ours, other in zip(gradients(None), gradients("triton"), strict=True):
        ours, other = (np.asarray(a, np.float32) for a in (ours, other))
        assert np.linalg.norm(ours - other) <= 2e-2 * np.linalg.norm(other)
