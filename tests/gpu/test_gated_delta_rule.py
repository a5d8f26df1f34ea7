"""The gated delta rule in Triton on a GPU: every feature, dtype and derivative against the formula in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._triton.gated_delta_rule import gated_delta_rule, gated_delta_rule_bwd, gated_delta_rule_jvp
from ejkernel.kernels._triton.gated_delta_rule.configs import space

from .device import TARGET
from .gated_delta_cases import CASES, Case, check, check_all, differentiable, formula, like

pytestmark = pytest.mark.gpu

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def kernels(x, spec):
    """The forward, backward and tangent, each with the config of the heuristics."""
    f, b, t = gated_delta_rule, gated_delta_rule_bwd, gated_delta_rule_jvp
    config = {g: g.heuristic(spec, x, TARGET) for g in (f, b, t)}
    return (
        lambda *x, spec: jax.jit(lambda *x: f(*x, spec=spec, config=config[f]))(*x),
        lambda x, ct, wrt, spec: jax.jit(lambda x, ct: b(x, None, ct, wrt=wrt, spec=spec, config=config[b]))(x, ct),
        lambda x, dot, spec: jax.jit(lambda x, dot: t(x, None, dot, spec=spec, config=config[t]))(x, dot),
    )


def compare(case: Case, length: int, dtype):
    x, spec = case.make(length, dtype)
    check_all(*kernels(x, spec), x, spec, dtype)


def check_forward(case: Case, length: int, dtype):
    """With every config of a few tokens."""
    x, spec = case.make(length, dtype)
    for config in space("gated_delta_rule", x, spec, TARGET):
        outputs = jax.jit(lambda *x, config=config: gated_delta_rule(*x, spec=spec, config=config))(*x)
        exact, rounded = (formula(x, spec, like(outputs), of)[0] for of in (jnp.float64, None))
        check((outputs, {}), (exact, {}), (rounded, {}), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_feature(case, dtype):
    compare(case, 200, dtype)


@pytest.mark.parametrize("D, E", [(16, 16), (64, 64), (128, 128), (96, 192), (72, 256)])
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=lambda dtype: dtype.dtype.name)
def test_sizes(D, E, dtype):
    compare(Case("sizes", D=D, E=E), 200, dtype)


@pytest.mark.parametrize("D, E", [(192, 128), (256, 256), (256, 512)])
def test_many_features(D, E):
    compare(Case("features", D=D, E=E), 200, jnp.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES[::2], ids=lambda dtype: dtype.dtype.name)
def test_two_thousand_tokens(dtype):
    compare(Case("long", B=1, H=4, G=2, D=128, E=128, decay=0.1), 2048, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("length", (1, 3, 8))
@pytest.mark.parametrize("case", [case for case in CASES if not case.ends], ids=lambda case: case.name)
def test_steps(case, length, dtype):
    check_forward(case, length, dtype)


@pytest.mark.parametrize("D, E", [(64, 64), (128, 128), (256, 72)])
def test_sizes_of_steps(D, E):
    check_forward(Case("tokens", D=D, E=E), 2, jnp.bfloat16)


def test_a_scan_of_steps():
    """Each in the place of the state before it, and equal to one call for all tokens."""
    x, spec = Case("scan", D=128, E=128, decay=0.1).make(12, jnp.float32)
    forward, _, _ = kernels(x, spec)

    def step(state, of_token):
        one = x._replace(**{name: a[:, None] for name, a in of_token.items()}, initial_state=state)
        outputs = gated_delta_rule(*one, spec=spec, config=gated_delta_rule.heuristic(spec, one, TARGET))
        return outputs.final_state, outputs.o[:, 0]

    tokens = {name: jnp.moveaxis(getattr(x, name), 1, 0) for name in ("q", "k", "v", "beta", "g")}
    final, o = jax.jit(lambda state: jax.lax.scan(step, state, tokens), donate_argnums=0)(x.initial_state + 0)
    wanted = forward(*x, spec=spec)
    np.testing.assert_allclose(jnp.moveaxis(o, 0, 1), wanted.o, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(final, wanted.final_state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.name)
def test_reruns_give_the_same_bits(case):
    x, spec = replace(case, D=128, E=128).make(500, jnp.bfloat16)
    forward, backward, _ = kernels(x, spec)

    def run():
        outputs = forward(*x, spec=spec)
        return outputs, backward(x, like(outputs), differentiable(x), spec=spec)

    for a, b in zip(jax.tree.leaves(run()), jax.tree.leaves(run()), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
