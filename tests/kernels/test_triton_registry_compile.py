"""The Triton kernels of every operation in the registry are lowered by jax-triton for GPUs that are not here.

That compiles them to PTX. Each kernel of the forward, tangent and backward is compiled once for each GPU; with all
dtypes and in all of the cases it is a slow test.
"""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("jax_triton")

from programs import launches

from ejkernel import modules
from ejkernel.kernels._target import lowering_for
from ejkernel.kernels._triton import _launch
from ejkernel.types import Platform, Target

from .bound import bound_by, written_in


@pytest.fixture(params=["NVIDIA A100", "NVIDIA H200", "NVIDIA B200", "NVIDIA GeForce RTX 5090"])
def target(request):
    """The target of a program in a process without a GPU."""
    target = Target("cuda", request.param)
    with lowering_for(target):
        yield target


@pytest.mark.parametrize("operation", written_in(Platform.TRITON))
def test_every_kernel_is_lowered(operation, target):
    bound, lowered = set(), set()
    for call in bound_by(operation, [jnp.bfloat16]):
        bound.add(call.primitive.name)
        entry = call.implementation(Platform.TRITON, target)
        if entry is None:
            continue
        traced = call.traced(entry, call.config(entry, target))
        kernels = {(call.primitive.name, kernel) for kernel in launches(traced.jaxpr)}
        if kernels - lowered:
            assert _lowered(traced) >= len(kernels)
            lowered |= kernels
    assert {primitive for primitive, _ in lowered} == bound


@pytest.mark.slow
@pytest.mark.parametrize("operation", written_in(Platform.TRITON))
def test_every_case_is_lowered(operation, target):
    for call in bound_by(operation, [jnp.bfloat16, jnp.float16, jnp.float32]):
        if entry := call.implementation(Platform.TRITON, target):
            traced = call.traced(entry, call.config(entry, target))
            assert _lowered(traced) == len(launches(traced.jaxpr)) > 0


@pytest.mark.parametrize("scale", (1e-39, 1.5e38))
def test_a_scale_that_is_hardly_a_float32(scale):
    """A subnormal scale, and one whose next power of two is infinite, with its gradient."""
    call = lambda *x: modules.flash_attention(*x, softmax_scale=scale, platform="triton").astype(jnp.float32).sum()
    with lowering_for(Target("cuda", "NVIDIA H200")):
        x = [jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)] * 3
        assert _lowered(jax.jit(jax.value_and_grad(call, (0, 1, 2))).trace(*x)) >= 2


def _lowered(traced) -> int:
    """The number of launches in the program for CUDA."""
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return sum(text.count(f"@{name}(") for name in _launch.CUSTOM_CALLS)
