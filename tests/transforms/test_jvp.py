"""Tangents equal those of the formula, along each operand and along all of them.

Tangents of options without an operand are slow tests, except in second derivatives of the first case.
"""

import jax
import pytest
from cases import DIFFERENTIABLE, assert_close, each_by_kind, each_with_another_operand, oracle, tangent


@each_with_another_operand(DIFFERENTIABLE)
def test_jvp(case):
    check(case, [case.differentiable])


@each_by_kind(DIFFERENTIABLE, rest=(pytest.mark.slow,))
def test_jvp_along_each_operand(case):
    check(case, [(name,) for name in case.differentiable])


def check(case, directions):
    arrays, tangents = case.arrays(), case.tangents()
    for wrt in directions:
        found = tangent(case.call, wrt)(arrays, tangents)
        zeros = {n: t if n in wrt else t * 0 for n, t in tangents.items()}
        assert_close(found, oracle(case, tangent)(arrays, zeros), what=f"along {wrt}: ")


@each_by_kind(DIFFERENTIABLE, rest=(pytest.mark.slow,))
def test_linearize(case):
    """The tangent map can be kept and called repeatedly."""
    arrays, wrt = case.arrays(), case.differentiable
    moving = {name: arrays[name] for name in wrt}
    results, pushed = jax.linearize(lambda moving: case.call({**arrays, **moving}), moving)
    for seed in (1, 2):
        tangents = case.tangents(seed)
        assert_close((results, pushed(tangents)), oracle(case, tangent)(arrays, tangents))
