"""In every dtype, results have at most twice the error of the formula in that dtype, gradients three times.

Both are errors against float64 on the same inputs, by the norm over a result. No result can be closer than the exact
one rounded, so the error of rounding is the least that the formula is taken to have. The hops of a ring are merged by
their lse, so the rounding of lse is the least there; each hop rounds its gradients, for which a half more is allowed.
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
    least = merging(case, exact) if transform is None else {}
    for (path, x), y, z in zip(jax.tree.leaves_with_path(found), *map(jax.tree.leaves, (formula, exact)), strict=True):
        rounded, name = jnp.asarray(z, x.dtype), jax.tree_util.keystr(path)
        error, allowed = distance(x, z), factor * max(distance(y, z), distance(rounded, z), least.get(name, 0))
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def merging(case, exact):
    """The error of o, by its path, if lse is rounded to float32 and o merged by it: a relative one of |lse|·2⁻²⁴."""
    if case.operation != "ring_attention":
        return {}
    o, lse = map(np.asarray, exact)
    seen = np.where(np.isfinite(lse), lse, 0)
    return {"[0]": np.linalg.norm(seen.swapaxes(1, 2)[..., None] * o) * 2.0**-24}


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
    check(case, dtype, gradient, 3.5 if case.over else 3)


@each(CASES, first=(), rest=(pytest.mark.slow,))
def test_every_case_in_bfloat16(case):
    check(case, jnp.bfloat16, None, 2)
    if case.differentiable:
        check(case, jnp.bfloat16, gradient, 3)
