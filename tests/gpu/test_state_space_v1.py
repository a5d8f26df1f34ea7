"""Mamba's state space in Triton on a GPU: outputs, gradients and tangents against float64."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._triton.state_space_v1 import (
    configs,
    splits,
    state_space_v1,
    state_space_v1_bwd,
    state_space_v1_jvp,
)
from ejkernel.kernels._triton.state_space_v1.problem import problem_of

from .state_space_v1_cases import CASES, SPEC, Case, check_all

pytestmark = pytest.mark.gpu
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def first(operation, x):
    return configs.space(operation, x, SPEC, gpu_target())[0]


def run_all(x, dtype, of_forward=None, of_derivatives=None):
    jitted = lambda f, **how: jax.jit(partial(f, **how))
    check_all(
        jitted(state_space_v1, config=of_forward or first("state_space_v1", x)),
        lambda x, ct, wrt: jitted(state_space_v1_bwd, wrt=wrt, config=of_derivatives or first("state_space_v1_bwd", x))(
            x, None, ct
        ),
        lambda x, dot: jitted(state_space_v1_jvp, config=of_derivatives or first("state_space_v1_jvp", x))(
            x, None, dot
        ),
        x,
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_float64(case, dtype):
    run_all(case.make(300, dtype), dtype)


@pytest.mark.parametrize("numbers", (16, 32, 48, 128))
def test_every_config(numbers):
    x = Case("channels", B=2, H=200, N=numbers).make(100, jnp.bfloat16)
    space = lambda operation: configs.space(operation, x, SPEC, gpu_target())
    for config in space("state_space_v1"):
        run_all(x, jnp.bfloat16, of_forward=config)
    for config in space("state_space_v1_bwd"):
        run_all(x, jnp.bfloat16, of_derivatives=config)


@pytest.mark.parametrize("numbers", (64, 128))
def test_large_states(numbers):
    run_all(Case("large", B=1, N=numbers).make(300, jnp.float32), jnp.float32)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("length", (512, 1536, 2050))
def test_parts_of_sequences(length, dtype):
    """With A of each batch element, as under vmap."""
    x = Case("long", B=2, decay=0.1, step=0.1).make(length, dtype)
    parts = splits.number_of(problem_of(x, first("state_space_v1", x)))
    assert parts == {512: 2, 1536: 4, 2050: 2}[length]
    run_all(x._replace(A=jnp.concatenate([x.A, 2 * x.A])), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("length", (1, 3, 8))
@pytest.mark.parametrize("case", [case for case in CASES if not case.ends], ids=lambda case: case.name)
def test_steps(case, length, dtype):
    """Of many channels: the errors of a few sums, which one token has, are a matter of chance."""
    x = replace(case, H=10 * case.H).make(length, dtype)
    run_all(x, dtype)


def test_a_scan_of_steps():
    """Each in the place of the state before it, and equal to one call for all tokens."""
    x = Case("scan").make(12, jnp.float32)

    def step(state, of_token):
        one = x._replace(**{name: a[:, None] for name, a in of_token.items()}, initial_state=state)
        outputs = state_space_v1(*one, config=first("state_space_v1", one))
        return outputs.final_state, outputs.o[:, 0]

    tokens = {name: jnp.moveaxis(getattr(x, name), 1, 0) for name in ("x", "B", "C", "dt")}
    final, o = jax.jit(lambda state: jax.lax.scan(step, state, tokens), donate_argnums=0)(x.initial_state + 0)
    wanted = jax.jit(partial(state_space_v1, config=first("state_space_v1", x)))(*x)
    np.testing.assert_allclose(jnp.moveaxis(o, 0, 1), wanted.o, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(final, wanted.final_state, rtol=1e-5, atol=1e-5)


def test_the_choice_and_equal_bits():
    x = Case("channels", B=2, H=300).make(500, jnp.bfloat16)
    call = lambda u, A, B, C, dt: ejkernel.lax.state_space_v1(u, A, B, C, x.D[0], dt)
    arrays = (x.x, x.A[0], x.B, x.C, x.dt)
    gradient = jax.jit(jax.grad(lambda a: (call(*a).astype(jnp.float32) ** 2).sum()))
    assert gradient.lower(arrays).as_text().count("triton_kernel_call") >= 3
    first_of = gradient(arrays)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, gradient(arrays), first_of)
