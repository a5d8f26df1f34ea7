"""The Triton kernels of every operation in the registry are lowered by jax-triton for GPUs that are not here.

That compiles them to PTX. Each kernel of the forward, tangent and backward is compiled once for each GPU; with all
dtypes and in all of the cases it is a slow test.
"""

from collections.abc import Iterator

import jax.numpy as jnp
import pytest

pytest.importorskip("jax_triton")

from cases import CASES, FAMILIES
from programs import launches

from ejkernel.kernels._registry import kernel_registry
from ejkernel.kernels._triton import _launch
from ejkernel.modules._operation import OPERATIONS
from ejkernel.types import Platform, Target

from .bound import Bound, bound

CAPABILITIES = {"NVIDIA A100": 80, "NVIDIA H200": 90, "NVIDIA B200": 100, "NVIDIA GeForce RTX 5090": 120}
WRITTEN_IN_TRITON = [
    name
    for name in OPERATIONS
    if any(entry.platform == Platform.TRITON for entry in kernel_registry.list_implementations(name))
]


@pytest.fixture(params=CAPABILITIES)
def target(request, monkeypatch) -> Target:
    """That which a program is lowered for in a process that has none."""
    monkeypatch.setattr(_launch, "compute_capability", lambda: CAPABILITIES[request.param])
    return Target("cuda", request.param)


def bound_by(operation: str, dtypes) -> Iterator[Bound]:
    for case in (*CASES, *FAMILIES):
        if case.operation == operation:
            for dtype in dtypes:
                yield from bound(case, dtype)


@pytest.mark.parametrize("operation", WRITTEN_IN_TRITON)
def test_every_kernel_is_lowered(operation, target):
    trio, lowered = OPERATIONS[operation].trio, set()
    for call in bound_by(operation, [jnp.bfloat16]):
        entry = call.implementation(Platform.TRITON, target)
        if entry is None:
            continue
        traced = call.traced(entry, target)
        kernels = {(call.primitive.name, kernel) for kernel in launches(traced.jaxpr)}
        if kernels - lowered:
            assert _lowered(traced) >= len(kernels)
            lowered |= kernels
    primitives = {trio.forward.name, trio.tangent.name, trio.backward.name}
    assert {primitive for primitive, _ in lowered} == primitives


@pytest.mark.slow
@pytest.mark.parametrize("operation", WRITTEN_IN_TRITON)
def test_every_case_is_lowered(operation, target):
    for call in bound_by(operation, [jnp.bfloat16, jnp.float16, jnp.float32]):
        if entry := call.implementation(Platform.TRITON, target):
            traced = call.traced(entry, target)
            assert _lowered(traced) == len(launches(traced.jaxpr)) > 0


def _lowered(traced) -> int:
    """How many launches there are in the program for CUDA."""
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return sum(text.count(f"@{name}(") for name in _launch.CUSTOM_CALLS)
