"""A call runs on the platform that `explain` names."""

import jax
import pytest

import ejkernel
from ejkernel.kernels._registry import kernel_registry
from ejkernel.kernels._triton import _launch
from ejkernel.modules import base, detect_platform
from ejkernel.modules._operation import OPERATIONS
from ejkernel.types import Target


def missing():
    raise ImportError("No module named 'triton'")


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    target = Target("cuda", "NVIDIA H200")
    monkeypatch.setattr(base, "device_target", lambda: target)
    return target


def in_triton() -> list[str]:
    """The operations that have a Triton kernel."""
    return sorted(n for n in OPERATIONS if any(e.platform == "triton" for e in kernel_registry.list_implementations(n)))


@pytest.mark.parametrize("operation", in_triton())
def test_triton_if_it_can_be_imported_else_xla(operation, hopper, monkeypatch):
    pytest.importorskip("jax_triton")
    assert detect_platform(operation) == "triton"
    monkeypatch.setattr(_launch, "jax_triton", missing)
    assert detect_platform(operation) == "xla"
    example = OPERATIONS[operation].example()
    explained = ejkernel.explain(operation, target=hopper, **example)
    assert all(reason for entry, reason in explained.candidates if entry.platform == "triton")
