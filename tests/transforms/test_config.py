"""A config changes how a result is computed, never what it is."""

import jax
import pytest
from cases import assert_close, each_case, each_operation, gradient, oracle, tangent

from ejkernel.ops import find_labels_in_lowered
from ejkernel.types import KernelConfig


@each_case
@pytest.mark.parametrize("blocks", ((4, 4), (8, 3), (1, 128)), ids=str)
def test_blocks(case, blocks):
    """Blocks that divide the axes, that do not, and that are larger than them."""
    config = dict(zip(("block_q", "block_k"), blocks, strict=True), platform="xla")
    call = lambda arrays: case.call(arrays, config=config)
    arrays, tangents = case.arrays(), case.tangents()
    cotangents = case.cotangents(arrays)
    found = jax.jit(tangent(call, case.differentiable))(arrays, tangents)
    assert_close(found, oracle(case, tangent)(arrays, tangents))
    found = jax.jit(gradient(call, case.differentiable))(arrays, cotangents)
    assert_close(found, oracle(case, gradient)(arrays, cotangents))


@each_operation
def test_a_config_for_the_target_names_the_implementation(case):
    """As when it was measured to be faster than one of higher priority."""
    config = KernelConfig(platform="xla", backend="gpu")
    traced = jax.jit(lambda arrays: case.call(arrays, config=config)).trace(case.arrays())
    (label,) = find_labels_in_lowered(traced.lower(lowering_platforms=("cuda",)))
    assert label.startswith(f"ejkernel[op={case.operation};impl=xla")
