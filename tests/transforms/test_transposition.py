"""Tangent and backward are transposes of each other: functions of a gradient can be differentiated again."""

import jax
import pytest
from cases import DIFFERENTIABLE, assert_close, core_of_kind, each_by_kind, first_of_each, gradient, oracle, tangent


@each_by_kind(DIFFERENTIABLE, rest=(pytest.mark.slow,))
def test_gradient_with_respect_to_the_cotangent(case):
    """Reverse over reverse with constant operands: ½|Jᵀ·(w ∘ u)|² differentiated with respect to w."""
    arrays = case.arrays()
    cotangents = case.cotangents(arrays)
    found = jax.jit(gradient_of_weights(case.call, case.differentiable))(arrays, cotangents)
    assert_close(found, oracle(case, gradient_of_weights)(arrays, cotangents))


@each_by_kind(DIFFERENTIABLE, rest=(pytest.mark.slow,))
def test_transpose_of_a_gradient_is_the_tangent(case):
    """The pullback is linear in its cotangents; its transpose is J, as by `jax.linear_transpose`."""
    arrays = case.arrays()
    tangents = {name: case.tangents()[name] for name in case.differentiable}
    pull = lambda cotangents: gradient(case.call, case.differentiable)(arrays, cotangents)
    (found,) = jax.linear_transpose(pull, case.cotangents(arrays))(tangents)
    assert_close(found, tangent(case.call, case.differentiable)(arrays, tangents)[1])


TINY = [case.resized(case.tiny) for case in first_of_each([case for case in DIFFERENTIABLE if case.tiny])]
BY_KIND = [pytest.param(x, id=str(x), marks=() if core_of_kind(x, TINY) else pytest.mark.slow) for x in TINY]


@pytest.mark.parametrize("case", BY_KIND)
def test_third_derivative(case):
    """The gradient of a gradient of a gradient, by the rule of a kind of operation for its tangent and backward.

    Each takes 4 to 18 seconds. Every operation has a second derivative on every change, in test_second_order.py.
    """
    arrays = case.arrays()
    cotangents = case.cotangents(arrays)
    found = jax.jit(third(case.call, case.differentiable))(arrays, cotangents)
    assert_close(found, oracle(case, third)(arrays, cotangents))


def gradient_of_weights(f, wrt):
    """(arrays, cotangents) -> the gradient of ½|Jᵀ·(w ∘ cotangents)|² with respect to w, at w = 1."""

    def run(arrays, cotangents):
        squared = lambda w: 0.5 * _square(gradient(f, wrt)(arrays, [w[i] * u for i, u in enumerate(cotangents)]))
        return jax.grad(squared)([u * 0 + 1 for u in cotangents])

    return run


def third(f, wrt):
    """(arrays, cotangents) -> the gradient of ½|∇(½|∇⟨cotangents, results⟩|²)|²."""

    def run(arrays, cotangents):
        first = lambda moving: gradient(f, wrt)({**arrays, **moving}, cotangents)
        second = jax.grad(lambda moving: 0.5 * _square(first(moving)))
        return jax.grad(lambda moving: 0.5 * _square(second(moving)))({name: arrays[name] for name in wrt})

    return run


def _square(tree):
    return sum((x * x).sum() for x in jax.tree.leaves(tree))
