"""The time of a function on a device."""

import ctypes
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

_SECONDS_OF_A_BATCH = 5e-3
# A batch has no more calls than a call of this duration would give it, so that the queue stays short.
_SECONDS_OF_THE_SHORTEST_CALL = 1e-4
# Where issuing the calls takes this part of their time, the device may have waited for the host.
_HOST_BOUND = 0.7
# The calls that are profiled then.
_PROFILED = 10


def benchmark(fn: Callable[[], Any], num_warmup: int = 2, num_iters: int = 10) -> float:
    """The time of `fn()` in milliseconds: the median over `num_iters` batches of calls.

    The calls of a batch (one, or as many as fill 5 ms) are issued together and waited for once, so that for short calls
    the device is measured and not the dispatch. `fn` may return any tree of arrays.
    """
    return float(np.median(list(batches(fn, num_warmup, num_iters))))


def batches(
    fn: Callable[[], Any], num_warmup: int, num_iters: int, seconds: float = _SECONDS_OF_A_BATCH
) -> Iterator[float]:
    """Yields the milliseconds of a call, each from a batch of about `seconds`.

    A compiled program with its arguments, as a `functools.partial`, may run faster than the host can issue its calls.
    Its time is that of its kernels then, where the device is one of NVIDIA and can be profiled.
    """
    for _ in range(max(num_warmup, 1)):
        jax.block_until_ready(fn())
    calls = max(1, round(seconds / max(_SECONDS_OF_THE_SHORTEST_CALL, _issued_and_done(fn, 1)[1])))
    for _ in range(max(num_iters, 1)):
        issued, done = _issued_and_done(fn, calls)
        of_kernels = _milliseconds_of_kernels(fn) if issued > _HOST_BOUND * done else None
        yield of_kernels or done * 1e3 / calls


def _issued_and_done(fn: Callable[[], Any], calls: int) -> tuple[float, float]:
    """The seconds until `calls` calls were issued, and until the device has run them one after the other.

    Only the last result is kept: many results, each in its own memory, would use the caches differently than a program.
    """
    start = time.perf_counter()
    for _ in range(calls):
        result = fn()
    issued = time.perf_counter() - start
    jax.block_until_ready(result)
    return issued, time.perf_counter() - start


def _milliseconds_of_kernels(fn: Callable[[], Any]) -> float | None:
    """The least time of the kernels of a call, without the gaps between them, as CUPTI profiles them.

    None if it does not: another profiler may be active, results of several calls may not fit into memory, and other
    devices have no CUPTI. Then there is still the time of a batch of calls.
    """
    if not (isinstance(fn, partial) and isinstance(fn.func, jax.stages.Compiled) and jax.default_backend() == "gpu"):
        return None
    try:
        from jax.experimental.mosaic.gpu import profiler

        _forget_dropped_records()
        _, times = profiler.measure(fn.func, iterations=_PROFILED)(*fn.args)
    except Exception:
        return None
    return times and min(times)


def _forget_dropped_records() -> None:
    """Sets CUPTI's count of dropped records to 0, by reading it.

    JAX's profiler drops the records that come when it has ended. At a count above 0 that of Mosaic GPU raises an error
    in a thread of CUPTI, which would end the process.
    """
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "libcupti" in line}
    for library in loaded:
        ctypes.CDLL(library).cuptiActivityGetNumDroppedRecords(None, 0, ctypes.byref(ctypes.c_size_t()))
