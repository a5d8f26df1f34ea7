"""The time of a function on a device."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

_SECONDS_OF_A_BATCH = 5e-3
# A batch has no more calls than a call of this duration would give it, so that the queue stays short.
_SECONDS_OF_THE_SHORTEST_CALL = 1e-4


def benchmark(fn: Callable[[], Any], num_warmup: int = 2, num_iters: int = 10) -> float:
    """The time of `fn()` in milliseconds: the median over `num_iters` batches of calls.

    The calls of a batch (one, or as many as fill 5 ms) are issued together and waited for once, so that for short calls
    the device is measured and not the dispatch. `fn` may return any tree of arrays.
    """
    return float(np.median(list(batches(fn, num_warmup, num_iters))))


def batches(
    fn: Callable[[], Any], num_warmup: int, num_iters: int, seconds: float = _SECONDS_OF_A_BATCH
) -> Iterator[float]:
    """Yields the milliseconds of a call, each from a batch of about `seconds`."""
    for _ in range(max(num_warmup, 1)):
        jax.block_until_ready(fn())
    calls = max(1, round(seconds / max(_SECONDS_OF_THE_SHORTEST_CALL, _seconds(fn, 1))))
    for _ in range(max(num_iters, 1)):
        yield _seconds(fn, calls) * 1e3 / calls


def _seconds(fn: Callable[[], Any], calls: int) -> float:
    """The seconds of `calls` calls that the device runs one after the other.

    Only the last result is kept: many results, each in its own memory, would use the caches differently than a program.
    """
    start = time.perf_counter()
    for _ in range(calls):
        result = fn()
    jax.block_until_ready(result)
    return time.perf_counter() - start
