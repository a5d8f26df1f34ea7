"""Tests run on eight CPU devices unless `JAX_PLATFORMS` is set, each with its own cache and without autotuning."""

import gc
import itertools
import os
from collections import Counter
from pathlib import Path

import xla_flags

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes of a distributed run share a GPU
os.environ.setdefault(
    "JAX_TRACEBACK_FILTERING", "off"
)  # otherwise JAX takes 70 ms to format an error that a test expects
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # otherwise it looks up source lines
# Matrices in NumPy are small, and BLAS threads would wait for each other on busy processors. A process that has already
# loaded NumPy keeps its threads; worker processes of a distributed run have not loaded it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["XLA_FLAGS"] = " ".join(
    (
        xla_flags.DEVICES,
        *xla_flags.COMPILES_FAST,
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",  # devices wait for each other on a busy machine
        os.environ.get("XLA_FLAGS", ""),  # the last setting wins
    )
)

import every_change
import jax
import jaxtyping
import pytest
from typechecker import check_all_calls

check_all_calls()

# After the usual 700 objects the garbage collector takes an eighth of the time in which the tests are collected: traces
# and test items are many objects, of which few are in cycles.
gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def own_environment(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("EJKERNEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_BUDGET_S", "inf")  # the same candidates are measured on a busy machine


@pytest.fixture
def types_unchecked(monkeypatch):
    """Switches the type checks off: for stand-ins, for values that no annotation admits, and for timing a call."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def strict():
    """No implicit promotion of dtypes or ranks: the library must work for users who forbid it."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("no GPU")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        for item in every_change.rest(items):
            item.add_marker(pytest.mark.slow)
        for item in every_change.halved(items):
            item.add_marker(pytest.mark.oldest)


# XLA keeps each program in its own memory mappings; Linux allows a process 65,530, beyond which it crashes.
MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), 16_000
_tests = itertools.count()


def pytest_runtest_teardown(item):
    if next(_tests) % 10 == 0 and MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


# CPU seconds of a run by file: unlike wall time, they are the same on a busy machine.
CLOSING_LIST, WORTH_IT = 10, 30.0
SPENT = pytest.StashKey[float]()


def _cpu() -> float:
    """CPU seconds of this process and of its finished children."""
    return sum(os.times()[:4])


def pytest_collection_finish(session):
    gc.freeze()  # thousands of test objects, which would be searched at every garbage collection
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
