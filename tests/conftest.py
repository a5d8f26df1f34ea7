"""Tests run on eight CPU devices unless `JAX_PLATFORMS` says otherwise, each with its own cache and without timing."""

import gc
import itertools
import os
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "JAX_TRACEBACK_FILTERING", "off"
)  # else JAX takes 70 ms to make an error that a test expects short
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # else it looks up the lines of pytest for every program
# Small matrices of NumPy, whose threads else wait for each other on processors that other tests compute on. What has
# loaded NumPy already keeps its threads: the processes of a run that is distributed have not.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",  # of LLVM, not of HLO: small programs compile in half the time
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",  # devices wait for each other on a busy machine
        os.environ.get("XLA_FLAGS", ""),  # the last one holds
    )
)

import jax
import jaxtyping
import pytest
from typechecker import check_all_calls

check_all_calls()


@pytest.fixture(autouse=True)
def own_environment(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("EJKERNEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_BUDGET_S", "inf")  # a busy machine measures the same candidates


@pytest.fixture
def types_unchecked(monkeypatch):
    """For stand-ins, for values that no annotation has, and for what a call costs."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def strict():
    """Nothing may be promoted silently, neither dtypes nor ranks: the library must hold where its users forbid it."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("no GPU")


# XLA keeps every program in memory mappings of its own, of which Linux gives a process 65,530; then it crashes.
MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), 16_000
_tests = itertools.count()


def pytest_runtest_teardown(item):
    if next(_tests) % 10 == 0 and MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


# What a run spent, file by file, in seconds of CPU: other than those of a clock, they are the same on a busy machine.
CLOSING_LIST, WORTH_IT = 10, 30.0
SPENT = pytest.StashKey[float]()


def _cpu() -> float:
    """Of this process and of those that it has started and waited for."""
    return sum(os.times()[:4])


def pytest_collection_finish(session):
    gc.freeze()  # thousands of tests, which else are searched for garbage whenever JAX makes much of it
    session.config.stash[SPENT] = _cpu()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    del call
    report, stash, now = (yield), item.config.stash, _cpu()
    report.cpu_seconds, stash[SPENT] = now - stash[SPENT], now
    return report


def pytest_terminal_summary(terminalreporter):
    spent: Counter = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        spent[getattr(report, "nodeid", "").split("::")[0]] += getattr(report, "cpu_seconds", 0.0)
    if (total := spent.total()) >= WORTH_IT:
        terminalreporter.section(f"{total:.0f} s of CPU in tests, of which the files that take most")
        for file, seconds in spent.most_common(CLOSING_LIST):
            terminalreporter.write_line(f"{seconds:7.1f} s {seconds / total:4.0%}  {file}")
