"""Random calls of every operation agree with their formulas; so do calls that once failed."""

import os
import time
from pathlib import Path

import jax
import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._composed import COMPOSED
from ejkernel.modules._operation import OPERATIONS

from .calls import Call
from .checks import check
from .failures import FAILURES
from .operations import BY_NAME
from .operations._draws import SIZES
from .search import Search

PARTS = int(os.environ.get("FUZZ_PARTS", 0))


def parts(operation: str) -> int:
    return PARTS or (BY_NAME[operation].SHARE if operation in BY_NAME else 1)


each_part = pytest.mark.parametrize(
    ("operation", "part"),
    [
        (operation, part)
        for operation in (*OPERATIONS, *sorted(BY_NAME.keys() & COMPOSED.keys()))
        for part in range(parts(operation))
    ],
)


def test_every_operation_has_calls():
    """A new operation brings `operations/<operation>.py` and `formulas/<operation>.py`, and a composed one may."""
    assert OPERATIONS.keys() <= BY_NAME.keys() <= OPERATIONS.keys() | COMPOSED.keys()


def _where_it_runs(call: Call, number: int):
    of_gpu = call.platform in ("triton", "pallas")
    return pytest.param(call, id=f"{call.operation}-{number}", marks=pytest.mark.gpu if of_gpu else ())


@pytest.mark.parametrize("call", [_where_it_runs(call, number) for number, call in enumerate(FAILURES)])
def test_what_once_failed(call):
    assert check(call)


@each_part
def test_calls(operation, part, record_property):
    """The same calls each time, as many as the machine has time for."""
    search(record_property, operation, seconds=2, seed=part)


@pytest.mark.slow
@each_part
def test_many_other_calls(operation, part, record_property):
    search(record_property, operation, seconds=800, seed=int(time.time()) + part, shrinking=300)


def parts_on(platform: str, operation: str) -> int:
    """Half as many where programs are compiled fast: so all are run at once by 28 processes."""
    return PARTS or (parts(operation) if platform == "pallas" else max(1, parts(operation) // 2))


def on_gpu() -> list[tuple[str, str, int]]:
    """Operation, platform and part of all implementations for a GPU."""
    found = []
    for operation in OPERATIONS:
        entries = kernel_registry.list_implementations(operation)
        platforms = {e.platform.value for e in entries if e.backend.value in ("gpu", "any")}
        found += [(operation, p, part) for p in sorted(platforms - {"xla"}) for part in range(parts_on(p, operation))]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("operation", "platform", "part"), on_gpu())
def test_calls_on_gpu(operation, platform, part, record_property):
    search(
        record_property,
        operation,
        seconds=100,
        seed=part,
        sizes=SIZES[platform],
    )


def search(record_property, operation, *, seconds, seed, **how) -> None:
    assert operation in BY_NAME, f"{operation} has no file in tests/fuzz/operations"
    seconds, seed = float(os.environ.get("FUZZ_SECONDS", seconds)), int(os.environ.get("FUZZ_SEED", 0)) + seed
    log = os.environ.get("FUZZ_LOG")
    one = Search(operation, seconds, seed, log=Path(log) if log else None, **how)
    start = time.monotonic()
    try:
        one.run()
    finally:
        record_property("fuzz", f"{one} in {time.monotonic() - start:.0f} s, seed {seed}")
        jax.clear_caches()
