"""Random calls of the kernels in Triton agree with their formulas, without a GPU."""

import pytest

pytest.importorskip("triton")

from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._operation import OPERATIONS
from ejkernel.types import Platform, Target

from .interpreted import SMALL, on
from .test_random_calls import search

OF_TRITON = [
    operation
    for operation in OPERATIONS
    if any(e.platform == Platform.TRITON for e in kernel_registry.list_implementations(operation))
]
TARGETS = {
    "H200": Target("cuda", "NVIDIA H200", 90, 132),
    "A100": Target("cuda", "NVIDIA A100-SXM4-80GB", 80, 108),
    "B200": Target("cuda", "NVIDIA B200", 100, 148),
    "MI300X": Target("rocm", "gfx942"),
}


@pytest.mark.parametrize("operation", OF_TRITON)
def test_calls(operation, monkeypatch, record_property):
    """The same calls each time, as many as the machine has time for."""
    on(TARGETS["H200"], monkeypatch)
    search(record_property, operation, seconds=2, seed=0, sizes=SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("operation", OF_TRITON)
@pytest.mark.parametrize("target", TARGETS)
def test_many_calls(target, operation, monkeypatch, record_property):
    on(TARGETS[target], monkeypatch)
    search(record_property, operation, seconds=100, seed=0, sizes=SMALL)
