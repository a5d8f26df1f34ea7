"""Eight host devices, and for each test a cache directory of its own and no measuring unless it asks for it."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import pytest


@pytest.fixture(autouse=True)
def own_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_BUDGET_S", "inf")  # a busy machine measures the same candidates
    for name in ("EJKERNEL_OPS_STAMP", "EJKERNEL_OPS_RECORD", "EJKERNEL_LOG_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)
