"""In every dtype, results have at most twice the error of the formula in that dtype, gradients three times.

Both are errors against float64 on the same inputs, by the norm over a result. No result can be closer than the exact
one rounded, so the error of rounding is the least that the formula is taken to have.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, FAMILIES, Case, each, each_by_kind, gradient, jitted, oracle

each_dtype = pytest.mark.parametrize(
    "dtype", (jnp.float32, jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)), ids=lambda x: x.__name__
)


def check(case, dtype, transform, factor):
    arrays = case.arrays(dtype=dtype)
    args = (arrays,) if transform is None else (arrays, case.cotangents(arrays))
    of = lambda f: jitted(case, f, transform)(*args)
    found, formula, exact = of(Case.call), of(Case.formula), oracle(case, transform)(*args)
    for (path, x), y, z in zip(jax.tree.leaves_with_path(found), *map(jax.tree.leaves, (formula, exact)), strict=True):
        rounded = jnp.asarray(z, x.dtype)
        error, allowed = distance(x, z), factor * max(distance(y, z), distance(rounded, z))
        assert error <= allowed, f"{jax.tree_util.keystr(path)}: error {error:.2e}, allowed {allowed:.2e}"


def distance(x, exact):
    """The norm of x − exact over finite values; the others must be equal."""
    x, finite = np.asarray(x, np.float64), np.isfinite(exact)
    np.testing.assert_array_equal(x[~finite], exact[~finite])
    return np.linalg.norm(x[finite] - exact[finite])


@each_by_kind(FAMILIES, first_over=())
@each_dtype
def test_result(case, dtype):
    check(case, dtype, None, 2)


@each([case for case in FAMILIES if case.differentiable], first=(), rest=(pytest.mark.slow,))
@each_dtype
def test_gradient(case, dtype):
    check(case, dtype, gradient, 3)


@each(CASES, first=(), rest=(pytest.mark.slow,))
def test_every_case_in_bfloat16(case):
    check(case, jnp.bfloat16, None, 2)
    if case.differentiable:
        check(case, jnp.bfloat16, gradient, 3)
