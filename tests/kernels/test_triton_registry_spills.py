"""No Triton kernel of any operation in the registry spills more than 512 bytes of registers with its heuristic config.

NVIDIA's assembler says so, without a GPU, of the features that models have. These are slow tests: an operation has
dozens of kernels.
"""

import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._target import lowering_for
from ejkernel.kernels._triton import _launch
from ejkernel.types import Platform

from . import compiler
from .bound import bound_by, written_in
from .test_triton_compile import KINDS

LIMIT = 512


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("features", [64, 128, 256])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("operation", written_in(Platform.TRITON))
def test_every_kernel(operation, target, features, dtype, monkeypatch):
    launches = {x for call in bound_by(operation, [dtype], features) for x in launches_of(call, target, monkeypatch)}
    assert not spilling(launches, target)


def launches_of(call, target, monkeypatch) -> list[compiler.Launch]:
    """The launches of a bound primitive with the heuristic config, if Triton takes it."""
    with lowering_for(KINDS[target]):
        entry = call.implementation(Platform.TRITON, KINDS[target])
        if entry is None:
            return []
        config = call.config(entry, KINDS[target])

        def trace():
            call.traced(entry, config)

        return compiler.launches(monkeypatch, _launch, trace)


def spilling(launches, target) -> list[str]:
    """Descriptions of the launches that spill more than the limit."""
    found = {launch: compiler.binary(launch, compiler.TARGETS[target]).spilled for launch in launches}
    return [f"{launch}: {spilled} bytes" for launch, spilled in found.items() if spilled > LIMIT]
