"""In JAX's 64-bit mode, 32-bit arrays give the same results as elsewhere: no index becomes 64 bits wide."""

import jax
import pytest
from cases import CASES, assert_close, each, first_of_each, gradient, oracle


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
