"""The linear recurrence in Triton on a GPU: every feature, dtype and derivative against the formula in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .device import TARGET
from .recurrence_cases import (
    CASES,
    Case,
    check,
    check_tangent,
    differentiable,
    directions,
    formula,
    like,
    poisoned,
    tangent_of_formula,
)

pytestmark = pytest.mark.gpu


def computed(x, spec):
    """(outputs, gradients by name) by the kernels, and the cotangents that they were given."""
    from ejkernel.kernels._triton._recurrence import recurrence, recurrence_bwd

    forward, backward = (f.heuristic(spec, x, TARGET) for f in (recurrence, recurrence_bwd))
    wrt = differentiable(x)
    outputs = jax.jit(lambda x: recurrence(*x, spec=spec, config=forward))(x)
    cotangents = like(outputs)
    gradients = jax.jit(lambda x, ct: recurrence_bwd(x, None, ct, wrt=wrt, spec=spec, config=backward))(x, cotangents)
    return (outputs, dict(zip(wrt, gradients, strict=True))), cotangents


def compare(case: Case, length: int, dtype):
    x, spec = case.make(length, dtype)
    found, cotangents = computed(poisoned(x), spec)
    check(found, formula(x, spec, cotangents, jnp.float64), formula(x, spec, cotangents), dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_feature(case, dtype):
    compare(case, 200, dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tangent(case, dtype):
    from ejkernel.kernels._triton._recurrence import recurrence_jvp

    x, spec = case.make(200, dtype)
    tangents = directions(x)
    config = recurrence_jvp.heuristic(spec, x, TARGET)
    f = jax.jit(lambda x, tangents: recurrence_jvp(x, None, tangents, spec=spec, config=config))
    wanted = (tangent_of_formula(x, spec, tangents, dtype) for dtype in (jnp.float64, None))
    check_tangent(f(poisoned(x), tangents), *wanted, dtype)


@pytest.mark.parametrize("gates", [dict(g_gamma=0.1), dict(gk=0.1)], ids=lambda gates: "".join(gates))
@pytest.mark.parametrize("D, V", [(16, 16), (64, 128), (128, 128), (256, 64), (256, 256), (64, 320), (256, 512)])
def test_feature_sizes(D, V, gates):
    compare(Case("sizes", gates, D=D, V=V), 200, jnp.bfloat16)


@pytest.mark.parametrize("ends", [(), (0, 0.35, 0.65, 1)], ids=["dense", "packed"])
@pytest.mark.parametrize("gates", [dict(gk=0.1), dict(gk=0.1, gv=0.1)], ids=lambda gates: "".join(gates))
def test_chunks_enough_for_all_values_in_a_program(gates, ends):
    compare(Case("programs", gates, B=1, H=32, G=32, D=128, V=256, ends=ends), 640, jnp.bfloat16)


@pytest.mark.parametrize("case", [replace(case, B=1) for case in CASES[:6]], ids=lambda case: case.name)
def test_two_thousand_tokens_in_splits(case):
    compare(replace(case, D=64, V=64), 2048, jnp.bfloat16)


@pytest.mark.parametrize("length", (1, 3, 8))
@pytest.mark.parametrize("case", [case for case in CASES if not case.ends], ids=lambda case: case.name)
def test_steps(case, length):
    compare(case, length, jnp.bfloat16)


@pytest.mark.parametrize("length", (1, 3))
def test_sizes_of_steps(length):
    compare(Case("steps", dict(gk=1.0, g=1.0, g_gamma=1.0), D=128, V=128), length, jnp.bfloat16)


@pytest.mark.parametrize("case", CASES[1:4], ids=lambda case: case.name)
def test_reruns_give_the_same_bits(case):
    x, spec = case.make(500, jnp.bfloat16)
    first, second = (computed(x, spec)[0] for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
