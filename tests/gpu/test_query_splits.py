"""The backward of flash_attention where thread blocks share a tile of keys, which are few: multi-query attention."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention import backward as mosaic
from ejkernel.kernels._pallas.gpu.flash_attention import configs as mosaic_configs
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Outputs

from .attention_cases import (
    CAUSAL,
    Case,
    check,
    derivatives,
    differentiable,
    like,
    poisoned,
    poisoned_cotangents,
)
from .device import ON_HOPPER, TARGET

pytestmark = ON_HOPPER

MQA = dict(B=1, H=16, G=1)
CASES = [
    Case("causal", **MQA, D=128, V=128, spec=CAUSAL),
    Case("full", B=2, H=12, G=2, S=1.6, K=0.53, D=72, V=72),
    Case("wide", **MQA, D=256, V=256, spec=CAUSAL),
    Case("192 and 128", **MQA, D=192, V=128, spec=CAUSAL),
    Case("96 and 64", **MQA, K=0.4, D=96, V=64),
    Case("window", **MQA, D=64, V=64, spec=FlashAttentionSpec(causal=True, window=(150, None), softcap=3.0)),
    Case("segments", **MQA, segments=True, D=128, V=128, spec=CAUSAL),
    Case("packed", **MQA, packed=True, D=128, V=128, spec=CAUSAL),
    Case("bias", **MQA, D=128, V=128, bias="hst", bias_dtype=jnp.bfloat16, spec=CAUSAL),
    Case("mask", **MQA, D=64, V=64, mask="st", sinks=1),
]
LENGTH = 600


def kernels(platform: str):
    """The module with the backward, and the configs."""
    if platform == "mosaic":
        return mosaic, mosaic_configs.space
    from ejkernel.kernels._triton.flash_attention import backward, configs

    return backward, configs.space


def gradients(case: Case, platform: str, monkeypatch):
    """The gradients, and what they are judged by: those of the formula in float64 and in bfloat16."""
    x, spec = case.make(LENGTH, jnp.bfloat16)
    module, space = kernels(platform)
    splits = []
    split = module.splits_of
    monkeypatch.setattr(module, "splits_of", lambda *sizes: splits.append(split(*sizes)) or splits[-1])
    (B, S, H, _), V, wrt = x.q.shape, x.v.shape[3], differentiable(x)
    cotangents = like(
        Outputs(jax.ShapeDtypeStruct((B, S, H, V), jnp.bfloat16), jax.ShapeDtypeStruct((B, H, S), jnp.float32)), 2
    )
    exact, rounded = (
        derivatives(x, spec, cotangents, {name: getattr(x, name) for name in wrt}, dtype)
        for dtype in (jnp.float64, jnp.bfloat16)
    )
    outputs = Outputs(jnp.asarray(exact[0].o, jnp.bfloat16), jnp.asarray(exact[0].lse, jnp.float32))
    config = space("flash_attention_bwd", x, spec, TARGET)[0]
    backward = jax.jit(lambda *a: module.flash_attention_bwd(*a, wrt=wrt, spec=spec, config=config))
    call = poisoned(x, spec), outputs, poisoned_cotangents(cotangents, x, spec)
    found = dict(zip(wrt, backward(*call), strict=True))
    assert splits[0] > 1
    return found, exact[1], rounded[1], lambda: backward(*call)


@pytest.mark.parametrize("platform", ["mosaic", "triton"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients(case, platform, monkeypatch):
    found, exact, rounded, _ = gradients(case, platform, monkeypatch)
    for name, gradient in found.items():
        check(f"d{name}", gradient, exact[name], rounded[name], factor=3)


@pytest.mark.parametrize("case", [case for case in CASES if case.bias is case.mask is None], ids=lambda case: case.name)
def test_deterministic_gradients(case, monkeypatch):
    """Right, and the same bits in 20 runs."""
    case = replace(case, spec=replace(case.spec, deterministic=True))
    found, exact, rounded, again = gradients(case, "mosaic", monkeypatch)
    for name, gradient in found.items():
        check(f"d{name}", gradient, exact[name], rounded[name], factor=3)
    for repeated in [again() for _ in range(20)]:
        for name, x in zip(found, repeated, strict=True):
            np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (found[name], x)), err_msg=name)
