"""A program run again gives the same bits."""

import jax
import numpy as np
import pytest
from cases import CASES, each, pullback, tangent


@each(CASES, rest=(pytest.mark.slow,))
@pytest.mark.parametrize("transform", (pullback, tangent), ids=("grad", "jvp"))
def test_rerun(case, transform):
    arrays = case.arrays()
    direction = case.cotangents(arrays) if transform is pullback else case.tangents()
    compiled = jax.jit(transform(case.call, case.differentiable))
    first, *again = (jax.tree.map(np.asarray, compiled(arrays, direction)) for _ in range(4))
    for results in again:
        jax.tree.map(np.testing.assert_array_equal, first, results)
