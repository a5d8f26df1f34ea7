"""Tests run on eight CPU devices unless `JAX_PLATFORMS` says otherwise, each with its own cache and without timing."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

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
