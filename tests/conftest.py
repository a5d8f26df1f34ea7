"""Tests run on eight CPU devices unless `JAX_PLATFORMS` says otherwise, each with its own cache and without timing."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",  # of LLVM, not of HLO: small programs compile in half the time
    "--xla_llvm_disable_expensive_passes=true",
)
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_given, *(flag for flag in _FLAGS if flag.split("=")[0] not in _given)]).strip()

import jax
import pytest


@pytest.fixture(autouse=True)
def own_environment(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("EJKERNEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
