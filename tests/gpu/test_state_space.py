"""Mamba-2's state space in Triton on a GPU: every feature, dtype and derivative against the formula in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .device import TARGET
from .state_space_cases import CASES, SPEC, Case, check_all, differentiable, like

pytestmark = pytest.mark.gpu

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def kernels(x):
    """The forward, backward and tangent, each with the config of the heuristics."""
    from ejkernel.kernels._triton.state_space_v2 import state_space_v2, state_space_v2_bwd, state_space_v2_jvp

    f, b, t = state_space_v2, state_space_v2_bwd, state_space_v2_jvp
    config = {g: g.heuristic(SPEC, x, TARGET) for g in (f, b, t)}
    backward = lambda x, ct, wrt: jax.jit(lambda x, ct: b(x, None, ct, wrt=wrt, config=config[b]))(x, ct)
    return (
        jax.jit(lambda *x: f(*x, config=config[f])),
        backward,
        jax.jit(lambda x, dot: t(x, None, dot, config=config[t])),
    )


def compare(case: Case, length: int, dtype):
    x = case.make(length, dtype)
    check_all(*kernels(x), x, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_feature(case, dtype):
    if case.large > 1 and dtype == jnp.float16:
        pytest.skip("products of two numbers of 30 overflow float16")
    compare(case, 200, dtype)


@pytest.mark.parametrize("P, N", [(16, 16), (64, 64), (64, 128), (128, 128), (64, 256), (320, 64)])
def test_sizes(P, N):
    compare(Case("sizes", P=P, N=N), 200, jnp.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES[::2], ids=lambda dtype: dtype.dtype.name)
def test_two_thousand_tokens_in_splits(dtype):
    compare(Case("long", B=1, H=8, G=1, P=64, N=128, step=0.1), 2048, dtype)


@pytest.mark.parametrize("length", (1, 3))
def test_single_tokens(length):
    compare(Case("steps", P=64, N=128), length, jnp.bfloat16)


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.name)
def test_reruns_give_the_same_bits(case):
    x = replace(case, P=64, N=128).make(500, jnp.bfloat16)
    forward, backward, _ = kernels(x)

    def run():
        outputs = forward(*x)
        return outputs, backward(x, like(outputs), differentiable(x))

    for a, b in zip(jax.tree.leaves(run()), jax.tree.leaves(run()), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
