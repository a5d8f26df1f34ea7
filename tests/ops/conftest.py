"""Eight host devices; each test has its own cache directory and measures only if it asks for it."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import threading
import warnings

import pytest

from ejkernel.ops import Tuner
from ejkernel.ops.core import budget, programs, tuner, values

from .budgeted import Clock, Steps


@pytest.fixture(autouse=True)
def own_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_BUDGET_S", "inf")  # the same candidates are measured on a busy machine
    for name in ("EJKERNEL_OPS_STAMP", "EJKERNEL_OPS_RECORD", "EJKERNEL_LOG_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "configs"


@pytest.fixture
def quiet():
    """Makes warnings errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(budget, "monotonic", found)
    monkeypatch.setattr(programs, "monotonic", found)
    monkeypatch.setattr(programs, "wait", found.wait)
    monkeypatch.setattr(programs.os, "cpu_count", lambda: 16)
    return found


@pytest.fixture
def steps(monkeypatch, types_unchecked):
    found = Steps()
    for module in (tuner, values):
        monkeypatch.setattr(module, "lowered", found.lowered)
    return found


@pytest.fixture
def event():
    found = threading.Event()
    yield found
    found.set()


@pytest.fixture
def slow_timing(clock, monkeypatch):
    """Timing a candidate takes 400 s; later candidates are faster."""
    timed = []

    def time(self, program, *_):
        timed.append(program)
        clock.now += 400
        return 1.0 / len(timed)

    monkeypatch.setattr(Tuner, "_time", time)
    monkeypatch.setattr(Tuner, "_interleaved", lambda *_: {})
