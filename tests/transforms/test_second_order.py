"""Second derivatives equal those of the formula, in every order of forward and reverse mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    DIFFERENTIABLE,
    assert_close,
    curvature,
    curvature_by_reverse,
    each,
    each_by_kind,
    first_of_each,
    gradient,
    oracle,
    tangent,
)

import ejkernel


def check(case, order):
    arrays, tangents = case.arrays(), case.tangents()
    cotangents = case.cotangents(arrays)
    found = jax.jit(order(case.call, case.differentiable))(arrays, cotangents, tangents)
    assert_close(found, oracle(case, curvature)(arrays, cotangents, tangents))


@each_by_kind(DIFFERENTIABLE, rest=(pytest.mark.slow,), first_over=())
def test_forward_over_reverse(case):
    check(case, curvature)


def test_types_that_are_mixed():
    """A product in bfloat16 with a float32 scale, without implicit promotion.

    The loss is homogeneous, of degree 2 in each operand, so its gradient changes by 5 times itself along them.
    """
    operands = jnp.ones((6, 4), jnp.bfloat16), jnp.ones((2, 4, 3), jnp.bfloat16), jnp.ones((2, 3))

    def loss(lhs, rhs, scale):
        options = dict(rhs_scale=scale, preferred_element_type=jnp.bfloat16)
        return (ejkernel.lax.grouped_matmul(lhs, rhs, jnp.array([2, 3]), **options) ** 2).sum()

    gradients, changes = jax.jvp(jax.grad(loss, (0, 1, 2)), operands, operands)
    for x, y, z in zip(operands, gradients, changes, strict=True):
        assert x.dtype == y.dtype == z.dtype
        np.testing.assert_array_equal(z.astype(jnp.float32), 5 * y.astype(jnp.float32))


@each(first_of_each(DIFFERENTIABLE), first=())
def test_reverse_over_reverse(case):
    check(case, curvature_by_reverse)


@each(first_of_each(DIFFERENTIABLE), first=())
def test_reverse_over_forward(case):
    """The gradient of a tangent."""
    check(case, reverse_over_forward)


@pytest.mark.slow
@each([case for case in DIFFERENTIABLE if case not in first_of_each(DIFFERENTIABLE)], first=())
def test_reverse_comes_last_or_twice(case):
    """The orders that another case of the operation always tests."""
    check(case, curvature_by_reverse)
    check(case, reverse_over_forward)


@each([case.resized(case.tiny) for case in DIFFERENTIABLE if case.tiny], first=())
def test_hessian(case):
    """In full: `jax.hessian` maps over every direction at once."""
    arrays = case.arrays()
    cotangents = case.cotangents(arrays)
    found = jax.jit(hessian(case.call, case.differentiable))(arrays, cotangents)
    assert_close(found, oracle(case, hessian)(arrays, cotangents))


def reverse_over_forward(f, wrt):
    """(arrays, cotangents, tangents) -> the gradient of ⟨cotangents, J·tangents⟩."""
    return lambda arrays, cotangents, tangents: gradient(lambda x: tangent(f, wrt)(x, tangents)[1], wrt)(
        arrays, cotangents
    )


def hessian(f, wrt):
    """(arrays, cotangents) -> the Hessian of ⟨cotangents, results⟩, by names twice."""

    def run(arrays, cotangents):
        weighed = lambda moving: sum((x * u).sum() for x, u in zip(f({**arrays, **moving}), cotangents, strict=True))
        return jax.hessian(weighed)({name: arrays[name] for name in wrt})

    return run
