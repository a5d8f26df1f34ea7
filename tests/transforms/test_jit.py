"""Under `jax.jit` an operation gives the same bits as outside, and is traced once."""

from functools import partial

import jax
import numpy as np
import pytest
from cases import CASES, Operand, each, each_by_kind


@each(CASES, rest=(pytest.mark.slow,))
def test_jit(case):
    arrays, traced = case.arrays(), []

    @jax.jit
    def compiled(arrays):
        traced.append(1)
        return case.call(arrays)

    jax.tree.map(np.testing.assert_array_equal, compiled(arrays), case.call(arrays))
    compiled(case.arrays(seed=1))
    assert len(traced) == 1


@each_by_kind(CASES, first_over=())
def test_shapes_without_arrays(case):
    """`jax.eval_shape` gives the types of the results that arrays have."""
    arrays = case.arrays()
    told, given = ([(x.shape, x.dtype) for x in f(arrays)] for f in (partial(jax.eval_shape, case.call), case.call))
    assert told == given
    assert [shape for shape, _ in told] == [Operand(axes).shape(case.sizes) for axes in case.results]
