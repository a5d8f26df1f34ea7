"""Mamba's state space in Triton on a GPU: outputs, gradients and tangents against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._triton.state_space_v1 import (
    configs,
    state_space_v1,
    state_space_v1_bwd,
    state_space_v1_jvp,
)

from .state_space_v1_cases import CASES, SPEC, Case, check, check_all, formula, like

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
@pytest.mark.parametrize("case", [case for case in CASES if case.N <= 32], ids=lambda case: case.name)
def test_against_float64(case, dtype):
    run_all(case.make(300, dtype), dtype)


@pytest.mark.parametrize("numbers", (16, 32))
def test_every_config(numbers):
    x = Case("channels", B=2, H=200, N=numbers).make(100, jnp.bfloat16)
    space = lambda operation: configs.space(operation, x, SPEC, gpu_target())
    for config in space("state_space_v1"):
        run_all(x, jnp.bfloat16, of_forward=config)
    for config in space("state_space_v1_bwd"):
        run_all(x, jnp.bfloat16, of_derivatives=config)


@pytest.mark.parametrize("numbers", (64, 128))
def test_large_states_forward(numbers):
    x = Case("large", B=1, N=numbers).make(300, jnp.float32)
    found = jax.jit(partial(state_space_v1, config=first("state_space_v1", x)))(*x)
    exact, rounded = (formula(x, SPEC, like(found), dtype)[0] for dtype in (jnp.float64, None))
    check((found, {}), (exact, {}), (rounded, {}), jnp.float32)


def test_the_choice_and_equal_bits():
    x = Case("channels", B=2, H=300).make(500, jnp.bfloat16)
    call = lambda u, A, B, C, dt: ejkernel.lax.state_space_v1(u, A, B, C, x.D[0], dt)
    arrays = (x.x, x.A[0], x.B, x.C, x.dt)
    gradient = jax.jit(jax.grad(lambda a: (call(*a).astype(jnp.float32) ** 2).sum()))
    assert gradient.lower(arrays).as_text().count("triton_kernel_call") >= 3
    first_of = gradient(arrays)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, gradient(arrays), first_of)
