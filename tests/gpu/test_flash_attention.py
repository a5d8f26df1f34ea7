"""flash_attention in Triton on a GPU: every feature, dtype and derivative against the formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .attention_cases import (
    CASES,
    CAUSAL,
    Case,
    check_all,
    derivatives,
    differentiable,
    like,
    poisoned,
    poisoned_cotangents,
)
from .device import TARGET

pytestmark = pytest.mark.gpu


class Kernels:
    """The three operations, each compiled once for operands like x: a call gives all results."""

    def __init__(self, x: Operands, spec: FlashAttentionSpec):
        from ejkernel.kernels._triton.flash_attention import flash_attention, flash_attention_bwd, flash_attention_jvp

        implementations = flash_attention, flash_attention_bwd, flash_attention_jvp
        forward, backward, tangent = (f.heuristic(spec, x, TARGET) for f in implementations)
        self.wrt = differentiable(x)
        self.forward = jax.jit(lambda x: flash_attention(*x, spec=spec, config=forward))
        self.backward = jax.jit(lambda *a: flash_attention_bwd(*a, wrt=self.wrt, spec=spec, config=backward))
        self.tangent = jax.jit(lambda *a: flash_attention_jvp(*a, spec=spec, config=tangent))

    def __call__(self, x: Operands, spec: FlashAttentionSpec, seed: int = 1):
        """(outputs, gradients by name, tangents), and the cotangents and tangents that they were given, but for the NaN
        in what nobody sees.
        """
        tangents = x._replace(
            **{name: like(getattr(x, name), seed) if name in self.wrt else None for name in x._fields}
        )
        given = poisoned(x, spec)
        outputs = self.forward(given)
        cotangents = like(outputs, seed + 1)
        gradients = self.backward(given, outputs, poisoned_cotangents(cotangents, x, spec))
        moved = self.tangent(given, outputs, poisoned(x, spec, tangents))
        return (outputs, dict(zip(self.wrt, gradients, strict=True)), moved), cotangents, tangents


def computed(x: Operands, spec: FlashAttentionSpec):
    return Kernels(x, spec)(x, spec)


def compare(case: Case, length: int, dtype):
    x, spec = case.make(length, dtype)
    results, cotangents, tangents = computed(x, spec)
    oracle = derivatives(x, spec, cotangents, tangents._asdict(), jnp.float64)
    reference = derivatives(x, spec, cotangents, tangents._asdict(), dtype)
    check_all(results, oracle, reference)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_feature(case, dtype):
    compare(case, 256, dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("D, V", [(16, 16), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_feature_sizes(D, V, dtype):
    compare(Case("sizes", S=0.9, H=4, G=2, D=D, V=V, spec=CAUSAL), 320, dtype)


@pytest.mark.parametrize("D", [128, 256])
@pytest.mark.parametrize("causal", [True, False])
def test_two_thousand_tokens(causal, D):
    compare(Case("long", B=1, H=4, G=2, D=D, V=D, spec=FlashAttentionSpec(causal=causal)), 2048, jnp.bfloat16)


@pytest.mark.parametrize("name", ["causal", "grouped heads", "bias of keys", "packed, causal", "dropout"])
def test_reruns_give_the_same_bits(name):
    (case,) = (case for case in CASES if case.name == name)
    x, spec = case.make(1000, jnp.bfloat16)
    first, second = (computed(x, spec)[0] for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("wrt", [("q",), ("k",), ("v",), ("k", "v"), ("q", "v")], ids=lambda wrt: "".join(wrt))
def test_gradients_of_some_operands(wrt):
    """They have the same bits as with all gradients, also from a cotangent of one output alone."""
    from ejkernel.kernels._triton.flash_attention import flash_attention, flash_attention_bwd

    x, spec = Case("some", spec=CAUSAL).make(256, jnp.bfloat16)
    config = KernelConfig(64, 64)
    outputs = flash_attention(*x, spec=spec, config=config)
    for cotangents in (like(outputs, 2), Outputs(like(outputs.o, 2), None), Outputs(None, like(outputs.lse, 2))):
        every = flash_attention_bwd(x, outputs, cotangents, wrt=("q", "k", "v"), spec=spec, config=config)
        some = flash_attention_bwd(x, outputs, cotangents, wrt=wrt, spec=spec, config=config)
        for name, gradient in zip(wrt, some, strict=True):
            np.testing.assert_array_equal(np.asarray(gradient), np.asarray(every["qkv".index(name)]))
