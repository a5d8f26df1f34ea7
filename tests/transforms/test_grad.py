"""Gradients equal those of the formula and the transposed tangents, and cost one forward and one backward kernel."""

import jax
import numpy as np
import pytest
from cases import (
    DIFFERENTIABLE,
    assert_close,
    each,
    each_differentiable,
    gradient,
    oracle,
    tangent,
    with_primitives,
)
from programs import equations


@each_differentiable
def test_grad(case):
    arrays = case.arrays()
    cotangents = case.cotangents(arrays)
    found = gradient(case.call, case.differentiable)(arrays, cotangents)
    assert {n: x.dtype for n, x in found.items()} == {n: arrays[n].dtype for n in case.differentiable}
    assert_close(found, oracle(case, gradient)(arrays, cotangents))


@each(DIFFERENTIABLE, first=(), rest=(pytest.mark.slow,))
def test_grad_of_each_result(case):
    """The cotangent of a single result: those of the others are symbolic zeros."""
    arrays = case.arrays()
    cotangents = case.cotangents(arrays)
    for i, cotangent in enumerate(cotangents):
        found = gradient(lambda arrays, i=i: [case.call(arrays)[i]], case.differentiable)(arrays, [cotangent])
        alone = [ct if i == j else ct * 0 for j, ct in enumerate(cotangents)]
        assert_close(found, oracle(case, gradient)(arrays, alone), what=f"of result {i}: ")


@each(DIFFERENTIABLE, first=(), rest=(pytest.mark.slow,))
def test_duality(case):
    """⟨u, J·t⟩ = ⟨Jᵀ·u, t⟩."""
    arrays, t = case.arrays(), case.tangents()
    u = case.cotangents(arrays)
    pushed = tangent(case.call, case.differentiable)(arrays, t)[1]
    pulled = gradient(case.call, case.differentiable)(arrays, u)
    products = lambda a, b: [x.astype(np.float64).ravel() * y for x, y in zip(a, _flat(b), strict=True)]
    ahead, back = (np.concatenate(products(_flat(a), b)) for a, b in ((u, pushed), (t, pulled)))
    assert abs(ahead.sum() - back.sum()) <= 1e-6 * (np.abs(ahead).sum() + np.abs(back).sum())


@each([case for case in with_primitives(DIFFERENTIABLE) if case.algorithm.linear], first=(), rest=(pytest.mark.slow,))
def test_linear_transpose(case):
    """An operation is transposed without a derivative in operands in which it is linear, as attention in v."""
    arrays = case.arrays()
    cotangents = case.cotangents(arrays)
    for group in case.algorithm.linear:
        moving = {name: arrays[name] for name in group if name in case.differentiable}
        if moving:
            (found,) = jax.linear_transpose(lambda x: case.call({**arrays, **x}), moving)(cotangents)
            assert_close(found, gradient(case.call, tuple(moving))(arrays, cotangents))


@each(with_primitives(DIFFERENTIABLE))
def test_one_forward_and_one_backward_kernel(case):
    """Gradients that are not used are not computed, and no tangent kernel remains."""
    arrays = case.arrays()
    cotangents = case.cotangents(arrays)
    for wrt in (case.differentiable, *((name,) for name in case.differentiable)):
        jaxpr = jax.make_jaxpr(gradient(case.call, wrt))(arrays, cotangents)
        kernels = equations(jaxpr, case.operation)
        assert [e.primitive.name for e in kernels] == [case.operation, f"{case.operation}_bwd"]
        assert kernels[1].params["results"] == tuple(f"{name}_bar" for name in wrt)


@each(with_primitives(DIFFERENTIABLE))
def test_no_kernel_for_constant_operands(case):
    """No tangent or backward kernel where no differentiable operand depends on the input."""
    arrays = case.arrays()
    pushed = jax.make_jaxpr(lambda t: jax.jvp(lambda _: case.call(arrays), (t,), (t,)))(1.0)
    assert [e.primitive.name for e in equations(pushed, case.operation)] == [case.operation]


def _flat(tree):
    return [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
