"""In JAX's 64-bit mode, 32-bit arrays give the same results as elsewhere: no index becomes 64 bits wide."""

import jax
import jax.numpy as jnp
import pytest
from cases import CASES, assert_close, each, first_of_each, gradient, oracle

import ejkernel


@each(CASES, first=(), rest=(pytest.mark.slow,))
def test_eval(case):
    arrays = case.arrays()
    with jax.enable_x64(True):
        found = case.call(arrays)
    wanted = oracle(case)(arrays)
    assert [x.dtype for x in found] == [x.dtype for x in case.call(arrays)]
    assert_close(found, wanted)


@each([case for case in first_of_each(CASES) if case.differentiable], first=())
def test_grad(case):
    arrays = case.arrays()
    cotangents = case.cotangents(arrays)
    with jax.enable_x64(True):
        found = gradient(case.call, case.differentiable)(arrays, cotangents)
    assert_close(found, oracle(case, gradient)(arrays, cotangents))


@each(first_of_each(CASES), first=())
def test_lowering_for_tpus(case):
    """Pallas kernels of TPUs are lowered as elsewhere: indices of blocks have 32 bits."""
    arrays = case.placed(case.arrays())
    f = lambda x: case.call(x)
    if case.differentiable:
        f = lambda x: gradient(case.call, case.differentiable)(x, case.cotangents(x))
    kernels = lambda: lowered_for_tpus(f, arrays).count("tpu_custom_call")
    wanted = kernels()
    with jax.enable_x64(True):
        assert kernels() == wanted


def test_arrays_of_64_bits_on_tpus():
    """No kernel takes them, and XLA computes with 64 bits."""
    with jax.enable_x64(True):
        q = jnp.ones((1, 16, 2, 8), jnp.float64)
        program = lowered_for_tpus(lambda q: ejkernel.lax.flash_attention(q, q, q), q)
    assert "tpu_custom_call" not in program and "f64" in program


def lowered_for_tpus(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
