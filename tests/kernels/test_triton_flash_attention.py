"""flash_attention in Triton: every kernel's masks and indices, by the interpreter, against the formula in float64."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import KernelConfig
from tests.gpu.attention_cases import (
    CASES,
    Case,
    check,
    check_near,
    derivatives,
    differentiable,
    error,
    like,
    poisoned,
    poisoned_cotangents,
)

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.flash_attention import (  # noqa: E402
    backward,
    flash_attention,
    flash_attention_bwd,
    flash_attention_jvp,
    tangent,
)

from . import interpreter, large_logits  # noqa: E402

LENGTH = 40
CONFIG = KernelConfig(block_q=16, block_k=32)


# The interpreter takes ten seconds and more a case.
ALWAYS = ("causal", "grouped heads", "packed, causal", "packed, from later on")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in ALWAYS else pytest.mark.slow) for case in CASES],
)
def test_in_the_interpreter(case, monkeypatch):
    """Forward, backward and tangent of small float32 calls, with NaN in unread entries."""
    _check_in_the_interpreter(case, monkeypatch)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ALWAYS], ids=lambda case: case.name)
def test_splits_in_the_interpreter(case, monkeypatch):
    """The same where three programs share the queries of a block of keys."""
    monkeypatch.setattr(backward, "splits_of", lambda *_: 3)
    _check_in_the_interpreter(case, monkeypatch)


def _check_in_the_interpreter(case, monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x, spec = case.make(LENGTH, jnp.float32)
    wrt = differentiable(x)
    tangents = x._replace(**{name: like(getattr(x, name), 1) if name in wrt else None for name in x._fields})
    given = poisoned(x, spec)
    outputs = flash_attention(*given, spec=spec, config=CONFIG)
    cotangents = like(outputs, 2)
    poisoned_ones = poisoned_cotangents(cotangents, x, spec)
    gradients = flash_attention_bwd(given, outputs, poisoned_ones, wrt=wrt, spec=spec, config=CONFIG)
    moved = flash_attention_jvp(given, outputs, poisoned(x, spec, tangents), spec=spec, config=CONFIG)
    results = outputs, dict(zip(wrt, gradients, strict=True)), moved
    check_near(results, x, spec, cotangents, tangents._asdict(), jnp.float32)


def passed(x, spec, wrt=("q", "k", "v")):
    """The outputs, tangents of the operands that `wrt` names, and the tangents of the outputs."""
    tangents = x._replace(**{name: like(getattr(x, name), 1) if name in wrt else None for name in x._fields})
    outputs = flash_attention(*x, spec=spec, config=CONFIG)
    return outputs, tangents, flash_attention_jvp(x, outputs, tangents, spec=spec, config=CONFIG)


@pytest.mark.parametrize("wrt", [("q", "k", "v"), ("q", "k")], ids=lambda wrt: "".join(wrt))
def test_values_that_wait_are_the_same(wrt, monkeypatch):
    """A tangent pass that reads values one step ahead has the same results as one that does not."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x, spec = Case("uneven", S=0.9, K=1.7, D=16, V=24, B=1, spec=FlashAttentionSpec(causal=True)).make(
        LENGTH, jnp.float32
    )
    results = []
    for waits in (False, True):
        monkeypatch.setattr(tangent, "values_wait", lambda *_, waits=waits: waits)
        results.append(passed(x, spec, wrt)[2])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_tangents_of_rows_whose_weight_comes_late(monkeypatch):
    """If the first tile of keys has next to no weight, the error of o_dot is relative to the keys with the weight."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    case = Case("late", S=1, K=77, D=128, V=128, sinks=2, spec=FlashAttentionSpec(window=(17, 30)))
    x, spec = replace(case, family="large").make(1, jnp.float16, seed=2)
    outputs, tangents, (o_dot, lse_dot) = passed(x, spec, differentiable(x))
    oracle, reference = (
        derivatives(x, spec, outputs, tangents._asdict(), dtype)[2] for dtype in (jnp.float64, jnp.float16)
    )
    check("o_dot", o_dot, oracle.o, reference.o, 3)
    assert error(lse_dot, oracle.lse) <= 3 * error(reference.lse, oracle.lse)


def test_a_large_softcap_is_none(monkeypatch):
    """The tanh of a millionth of a logit is that number, and not its rounding relative to 1."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x, spec = Case("capped", B=1, H=1, G=1, D=16, V=16).make(20, jnp.float32)
    found, wanted = (passed(x, replace(spec, softcap=softcap)) for softcap in (1e6, None))
    np.testing.assert_allclose(found[0].o, wanted[0].o, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[0].lse, wanted[0].lse, rtol=1e-6)
    np.testing.assert_allclose(found[2].o, wanted[2].o, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype, sinks", [("float32", True), ("bfloat16", False), ("bfloat16", True)])
def test_gradients_of_logits_near_1e12(dtype, sinks, monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x = large_logits.operands(jnp.dtype(dtype), sinks=sinks)
    large_logits.check(large_logits.of_kernels(flash_attention_bwd, flash_attention_jvp, x, config=CONFIG), x)


@pytest.mark.parametrize("size, largest", [(4e3, 5e7), (1.5e4, 7e8)])
def test_weights_of_large_logits(size, largest, monkeypatch):
    """With very different logits one key has all the weight: in 16 bits, with a folded scale."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    spec = FlashAttentionSpec(causal=True, softmax_scale=0.3)
    q, k, v = (large_logits.normal(seed, jnp.float16, LENGTH, 16) for seed in range(3))
    x = Operands(size * q, size * k, v)
    found = flash_attention(*x, spec=spec, config=CONFIG)
    s = spec.softmax_scale * np.einsum("bshd,bthd->bhst", *(np.asarray(a, np.float64) for a in (x.q, x.k)))
    s = np.where(np.tri(LENGTH, dtype=bool), s, -np.inf)
    assert np.abs(s[np.isfinite(s)]).max() > largest
    heaviest = np.take_along_axis(np.asarray(v), s.argmax(-1).swapaxes(1, 2)[..., None], axis=1)
    np.testing.assert_array_equal(found.o, heaviest)
    np.testing.assert_allclose(found.lse, s.max(-1), rtol=0, atol=2e-7 * np.abs(s[np.isfinite(s)]).max())
