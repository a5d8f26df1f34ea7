"""Under `jax.jit` an operation gives the bits that it gives outside, and is traced once."""

import jax
import numpy as np
import pytest
from cases import each_case

pytestmark = pytest.mark.core


@each_case
def test_jit(case):
    arrays, traced = case.arrays(), []

    @jax.jit
    def compiled(arrays):
        traced.append(1)
        return case.call(arrays)

    jax.tree.map(np.testing.assert_array_equal, compiled(arrays), case.call(arrays))
    compiled(case.arrays(seed=1))
    assert len(traced) == 1


@each_case
def test_shapes_without_arrays(case):
    """`jax.eval_shape` tells the types of the results."""
    arrays = case.arrays()
    told = jax.eval_shape(case.call, arrays)
    assert [(x.shape, x.dtype) for x in told] == [(x.shape, x.dtype) for x in case.call(arrays)]
