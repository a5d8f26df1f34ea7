"""The absorbed forward of flash_mla on GPUs: which kernels take a call, their results, derivatives, and transforms."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels import _flash_mla as expanded
from ejkernel.kernels._dispatch import candidates, select
from ejkernel.kernels._registry import kernel_registry
from ejkernel.kernels._target import lowering_for
from ejkernel.primitives.flash_attention import FlashAttentionSpec
from ejkernel.primitives.flash_mla import Operands
from ejkernel.types import KernelConfig, Platform, Target

from .test_absorbed_mla import NAMES, arrays, by, decoding, largest, prepared

pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch
from tests.gpu.attention_cases import check_all, like
from tests.gpu.test_flash_mla import formula, inputs

from . import interpreter
from .against_xla import implementation
from .mosaic import lowered

HOPPER, AMPERE = Target("cuda", "NVIDIA H200", 90, 132), Target("cuda", "NVIDIA A100-SXM4-80GB", 80, 108)
MOSAIC, TRITON = (
    next(e for e in kernel_registry.list_implementations("flash_mla") if (e.platform, e.backend) == (platform, "gpu"))
    for platform in (Platform.PALLAS, Platform.TRITON)
)
KERNELS = {Platform.PALLAS: "mosaic_gpu_v2", Platform.TRITON: "triton_kernel_call_ffi"}


@pytest.mark.parametrize("batch, queries, heads", ((1, 1, 16), (32, 4, 128)))
@pytest.mark.parametrize("target, entry", ((HOPPER, MOSAIC), (AMPERE, TRITON)), ids=("mosaic", "triton"))
def test_is_lowered_to_kernels_over_latents(target, entry, batch, queries, heads):
    x, spec = decoding(batch, queries, heads=heads)
    assert select("flash_mla", spec, x, target) == entry
    config = entry.implementation.heuristic(spec, x, target)
    with lowering_for(target):
        of = jax.jit(lambda x: entry.implementation(*x, spec=spec, config=config)).trace(x)
        text = of.lower(lowering_platforms=("cuda",)).as_text()
    assert KERNELS[entry.platform] in text
    assert largest(text) == max(batch * 4096 * 576, 512 * heads * 128) < batch * 4096 * heads * 128


def test_triton_takes_fewer_queries():
    """Its kernels take three times as long for a flop over latents: S·(3·(2·R + Dr) − Dn − Dr − V) decides."""

    def taken(entry, heads):
        takes = lambda n: entry.implementation.supports(*reversed(decoding(queries=n, heads=heads)), HOPPER) is None
        return [n for n in (1, 16, 48, 64, 192, 256) if takes(n)]

    for heads in (1, 16, 128):  # on a device that has a part of them the choice is the same
        assert taken(MOSAIC, heads) == [1, 16, 48, 64, 192] and taken(TRITON, heads) == [1, 16, 48]


@pytest.mark.parametrize("sizes", (dict(keys=4100), dict(dtype=jnp.float32)), ids=str)
def test_what_mosaic_does_not_take_is_taken_by_triton(sizes):
    x, spec = decoding(**sizes)
    assert "latents as pages: " in MOSAIC.implementation.supports(spec, x, HOPPER)
    assert select("flash_mla", spec, x, HOPPER) == TRITON


REFUSED = {
    "mask": (dict(mask=jax.ShapeDtypeStruct((1, 1, 4, 4096), bool)), {}, "mask: the kernels over latents"),
    "traced scale": (dict(softmax_scale=jax.ShapeDtypeStruct((1, 1), jnp.float32)), {}, "softmax_scale: the kernels"),
    "segments": (
        {f"{of}_segment_ids": jax.ShapeDtypeStruct((1, n), jnp.int32) for of, n in (("q", 4), ("kv", 4096))},
        {},
        "q_segment_ids, kv_segment_ids: the kernels over latents",
    ),
    "all keys": ({}, dict(causal=False), "not causal"),
    "window to the right": ({}, dict(causal=False, window=(7, 3)), "not causal"),
    "window before the query": ({}, dict(window=(None, -2)), "not causal"),
    "batch": ({}, dict(batch_invariant=True), "batch size"),
    "many queries": (dict(q=jax.ShapeDtypeStruct((1, 512, 16, 192), jnp.bfloat16)), {}, "512 queries"),
}


@pytest.mark.parametrize("call", REFUSED)
def test_kernels_over_latents_refuse(call):
    """What they have no place for, which is then expanded."""
    operands, options, reason = REFUSED[call]
    x, spec = decoding(queries=4)
    spec = FlashAttentionSpec(**(dict(causal=True, softmax_scale=spec.softmax_scale) | options))
    found = candidates("flash_mla", spec, x._replace(**operands), HOPPER)
    assert all(reason in why for entry, why in found if entry in (MOSAIC, TRITON))
    assert any(why is None for _, why in found)


@pytest.mark.parametrize("window", ((None, None), (None, 5), (100, None)), ids=str)
def test_one_query_sees_all_keys_with_and_without_causality(window):
    x, spec = decoding()
    assert select("flash_mla", replace(spec, causal=False, window=window), x, HOPPER) == MOSAIC


@pytest.mark.parametrize("transform", ("grad", "jvp", "vmap", "vmap of projections"))
def test_transforms_are_lowered(transform):
    """At the sizes of DeepSeek-V3, for a Hopper GPU."""
    x, _ = decoding(queries=2)
    of = dict(zip(NAMES, (*x[:3], *(jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in x[3:5])), strict=True))
    attend = partial(ejkernel.lax.flash_mla, causal=True, return_lse=True)
    mapped = {"vmap": NAMES, "vmap of projections": NAMES[3:]}.get(transform, ())
    of |= {name: jax.ShapeDtypeStruct((3, *of[name].shape), jnp.bfloat16) for name in mapped}
    run = {
        "grad": jax.grad(lambda x: sum(a.astype(jnp.float32).sum() for a in attend(**x))),
        "jvp": lambda x: jax.jvp(lambda x: attend(**x), (x,), (x,)),
    }
    text = lowered(
        run.get(transform, jax.vmap(lambda x: attend(**x), ({n: 0 if n in mapped else None for n in of},))), of
    )
    assert text.count(f"custom_call @{KERNELS[Platform.PALLAS]}") == 1  # fewer than 64 queries are then Triton's
    assert ("tensor<1x4096x16x192x" in text) == (transform in ("grad", "jvp"))


@pytest.mark.parametrize("queries, kernels", ((100, 3), (512, 2)))
def test_a_gradient_computes_the_forward_again(queries, kernels):
    """By the expanded keys, after a forward that has attended to the latents; Mosaic's, of 64 queries or more."""
    x, _ = decoding(queries=queries)
    of = dict(zip(NAMES, (*x[:3], *(jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in x[3:5])), strict=True))
    loss = lambda x: ejkernel.lax.flash_mla(**x, causal=True).astype(jnp.float32).sum()
    assert lowered(jax.grad(loss), of).count(f"custom_call @{KERNELS[Platform.PALLAS]}") == kernels


def test_is_exported_for_any_batch():
    """By XLA, as kernels are compiled for static sizes."""
    (b,) = jax.export.symbolic_shape("b")
    x, _ = decoding()
    of = [jax.ShapeDtypeStruct((b, *a.shape[1:]), a.dtype) for a in x[:3]]
    of += [jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in x[3:5]]
    text = jax.export.export(jax.jit(ejkernel.lax.flash_mla), platforms=("cuda",))(*of).mlir_module()
    assert "x4096x576xbf16" in text and "x4096x16x" not in text


# --- In the interpreter -----------------------------------------------------------------------------------------------


INTERPRETED = {
    "one query": (1, 40, {}),
    "one query, window to the right": (1, 40, dict(window=(8, 3))),
    "causal": (3, 40, dict(causal=True)),
    "window, softcap and sinks": (3, 40, dict(causal=True, window=9, softcap=1.5, sinks=np.ones((3, 2), np.float32))),
    "as many queries as keys": (2, 2, dict(causal=True)),
    "splits": (3, 600, dict(causal=True)),
}


@pytest.mark.parametrize("call", INTERPRETED)
def test_in_the_interpreter(call, monkeypatch):
    """The Triton kernels; latents that no query sees hold NaN."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    queries, keys, options = INTERPRETED[call]
    x = arrays(queries, keys, dtype=jnp.float32)
    left = options.get("window", keys)
    hidden = max(0, keys - queries + 1 - (left if isinstance(left, int) else left[0] + 1))
    poisoned = {n: a.at[:, :hidden].set(jnp.nan) if n in NAMES[1:3] else a for n, a in x.items()}
    operands, spec = prepared(poisoned, **options)
    kernel = TRITON.implementation
    for config in (KernelConfig(block_q=16, block_k=16), kernel.heuristic(spec, operands, AMPERE)):
        with lowering_for(AMPERE):
            found = kernel(*operands, spec=spec, config=config)
        for a, b in zip(found, by(expanded, x, **options), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_any_tile_has_the_splits_of_the_likeliest():
    """Parts of o in float32 for each split."""
    x, spec = decoding(keys=32768)
    likeliest, *_ = space = TRITON.implementation.space(spec, x, HOPPER)
    other = replace(likeliest, block_k=16, num_warps=8)
    assert other not in space
    with lowering_for(HOPPER):
        of = [lowered(lambda x, c=c: TRITON.implementation(*x, spec=spec, config=c), x) for c in (likeliest, other)]
    parts = [re.findall(r"tensor<1x1x(\d+)x16x512xf32>", text) for text in of]
    assert int(parts[0][0]) > 1 and parts[0][0] == parts[1][0]


def test_derivatives_have_the_lse_of_the_keys_that_they_expand(monkeypatch):
    """At large logits, where the rounding of a key moves its weight: the contract of precision for all derivatives."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x, spec = inputs(jnp.float16, "large")
    x, config = x._replace(q=x.q[:, -4:]), KernelConfig(block_q=16, block_k=32)
    tangent, backward = (implementation("flash_mla" + suffix, "triton", "gpu") for suffix in ("_jvp", "_bwd"))
    with lowering_for(AMPERE):
        outputs = TRITON.implementation(*x, spec=spec, config=TRITON.implementation.heuristic(spec, x, AMPERE))
        cotangents, tangents = like(outputs, 1), like(Operands(*x[:5]), 2)
        gradients = backward(x, outputs, cotangents, wrt=NAMES, spec=spec, config=config)
        moved = tangent(x, outputs, tangents, spec=spec, config=config)
    results = outputs, dict(zip(NAMES, gradients, strict=True)), moved
    tangents = dict(zip(NAMES, tangents[:5], strict=True))
    check_all(results, *(formula(x, spec, cotangents, tangents, kind) for kind in (jnp.float64, jnp.float16)))
