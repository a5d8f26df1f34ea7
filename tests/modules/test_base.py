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
def test_triton_if_it_can_be_imported_else_what_runs(operation, hopper, monkeypatch):
    pytest.importorskip("jax_triton")
    assert detect_platform(operation) == "triton"
    monkeypatch.setattr(_launch, "jax_triton", missing)
    example = OPERATIONS[operation].example()
    explained = ejkernel.explain(operation, target=hopper, **example)
    assert all(reason for entry, reason in explained.candidates if entry.platform == "triton")
    assert detect_platform(operation) == detect_platform(operation, maybe_pallas=True) == explained.config.platform


def test_a_tangent_and_a_backward_have_the_platform_that_runs_them(hopper, monkeypatch):
    """A forward may have a kernel where its backward has none, and the other way around."""
    pytest.importorskip("jax_triton")
    derivatives = ("gla_bwd", "flash_attention_bwd", "flash_attention_jvp", "grouped_matmul_jvp", "grouped_matmul_bwd")
    assert {detect_platform(name) for name in derivatives} == {"triton"}
    monkeypatch.setattr(_launch, "jax_triton", missing)
    assert [detect_platform(name) for name in derivatives] == ["xla", "pallas", "pallas", "xla", "pallas"]


@pytest.mark.parametrize("maybe_pallas, platform", [(False, "xla"), (True, "pallas")])
def test_of_an_algorithm_that_is_no_operation(maybe_pallas, platform, hopper, monkeypatch):
    monkeypatch.setattr(kernel_registry, "_registry", dict(kernel_registry._registry))
    for written_in in ("xla", "pallas"):
        kernel_registry.register("of_a_user", written_in, "gpu")(lambda x: x)
    assert detect_platform("of_a_user", maybe_pallas=maybe_pallas) == platform
