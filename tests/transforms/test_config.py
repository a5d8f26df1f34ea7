"""A config changes how a result is computed, not its value."""

from dataclasses import fields

import jax
import pytest
from cases import CASES, assert_close, each, first_of_each, gradient, oracle, tangent, with_primitives

from ejkernel.modules._operation import OPERATIONS
from ejkernel.ops import find_labels_in_lowered


@each(with_primitives(CASES), first=(), rest=(pytest.mark.slow,))
def test_blocks(case):
    """Blocks that divide the axes."""
    check(case, (4, 4))


@each(with_primitives(CASES), first=(), rest=(pytest.mark.slow,))
@pytest.mark.parametrize("blocks", ((8, 3), pytest.param((1, 128), marks=pytest.mark.slow)), ids=str)
def test_odd_blocks(case, blocks):
    """Blocks that do not divide the axes, or exceed them."""
    check(case, blocks)


def config_class(case):
    return OPERATIONS[case.operation].config_class


def check(case, blocks):
    sizes = [field.name for field in fields(config_class(case)) if field.type is int and not field.kw_only]
    config = dict(zip(sizes, blocks, strict=False), platform="xla")
    call = lambda arrays: case.call(arrays, config=config)
    arrays, tangents = case.arrays(), case.tangents()
    if not case.differentiable:
        assert_close(jax.jit(call)(arrays), oracle(case)(arrays))
        return
    cotangents = case.cotangents(arrays)
    found = jax.jit(tangent(call, case.differentiable))(arrays, tangents)
    assert_close(found, oracle(case, tangent)(arrays, tangents))
    found = jax.jit(gradient(call, case.differentiable))(arrays, cotangents)
    assert_close(found, oracle(case, gradient)(arrays, cotangents))


@each(first_of_each(with_primitives(CASES)))
def test_a_config_for_the_target_names_the_implementation(case):
    """As if measured to be faster than an implementation of higher priority."""
    config = config_class(case)(platform="xla", backend="gpu")
    traced = jax.jit(lambda arrays: case.call(arrays, config=config)).trace(case.arrays())
    (label,) = find_labels_in_lowered(traced.lower(lowering_platforms=("cuda",)))
    assert label.startswith(f"ejkernel[op={case.operation};impl=xla")
