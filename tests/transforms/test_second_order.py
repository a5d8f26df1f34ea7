"""Second derivatives are those of the formula, in every order of forward and reverse."""

import jax
import pytest
from cases import (
    CASES,
    assert_close,
    curvature,
    curvature_by_reverse,
    each,
    first_of_each,
    gradient,
    oracle,
    tangent,
)


def check(case, order):
    arrays, tangents = case.arrays(), case.tangents()
    cotangents = case.cotangents(arrays)
    found = jax.jit(order(case.call, case.differentiable))(arrays, cotangents, tangents)
    assert_close(found, oracle(case, curvature)(arrays, cotangents, tangents))


@each(CASES, rest=(pytest.mark.slow,))
def test_forward_over_reverse(case):
    check(case, curvature)


@each(first_of_each(CASES), first=())
def test_reverse_over_reverse(case):
    check(case, curvature_by_reverse)


@each(first_of_each(CASES), first=())
def test_reverse_over_forward(case):
    """The gradient of a tangent."""
    check(case, reverse_over_forward)


@pytest.mark.slow
@each([case for case in CASES if case not in first_of_each(CASES)])
def test_reverse_comes_last_or_twice(case):
    """The orders in which another case of the operation is tested always."""
    check(case, curvature_by_reverse)
    check(case, reverse_over_forward)


@each([case.resized(case.tiny) for case in CASES if case.tiny], first=())
def test_hessian(case):
    """In whole, as `jax.hessian` maps over every direction at once."""
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
