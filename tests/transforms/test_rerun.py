"""A program run again gives the same bits."""

import jax
import numpy as np
import pytest
from cases import DIFFERENTIABLE, FORWARD_ONLY, each, pullback, tangent


@each(FORWARD_ONLY, first=(), rest=(pytest.mark.slow,))
def test_rerun_of_a_forward(case):
    check(case.call, case.arrays())


@each(DIFFERENTIABLE, first=(), rest=(pytest.mark.slow,))
@pytest.mark.parametrize("transform", (pullback, tangent), ids=("grad", "jvp"))
def test_rerun(case, transform):
    arrays = case.arrays()
    direction = case.cotangents(arrays) if transform is pullback else case.tangents()
    check(transform(case.call, case.differentiable), arrays, direction)


def check(f, *args):
    compiled = jax.jit(f)
    first, *again = (jax.tree.map(np.asarray, compiled(*args)) for _ in range(4))
    for results in again:
        jax.tree.map(np.testing.assert_array_equal, first, results)
