"""The time of a function on a device."""

import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SECONDS_OF_A_BATCH = 5e-3
# A batch has no more calls than a call of this duration would give it, so that the queue stays short.
_SECONDS_OF_THE_SHORTEST_CALL = 1e-4
# Where issuing the calls takes this part of their time, the device may have waited for the host.
_HOST_BOUND = 0.7
# The queue of a GPU has about a thousand places; a call may be a dozen kernels.
_MOST_QUEUED = 32
# The device is kept busy for this multiple of the time that the host takes to issue the calls.
_BUSY = 1.3


def benchmark(fn: Callable[[], Any], num_warmup: int = 2, num_iters: int = 10) -> float:
    """The time of `fn()` in milliseconds: the median over `num_iters` batches of calls.

    The calls of a batch (one, or as many as fill 5 ms) are issued together and waited for once, and where an
    accelerator is faster than the host issues them, while it is busy with other work; so that for short calls the
    device is measured and not the dispatch. `fn` may return any tree of arrays.
    """
    return float(np.median(list(batches(fn, num_warmup, num_iters))))


def batches(
    fn: Callable[[], Any], num_warmup: int, num_iters: int, seconds: float = _SECONDS_OF_A_BATCH
) -> Iterator[float]:
    """Yields the milliseconds of a call, each from a batch of about `seconds`."""
    for _ in range(max(num_warmup, 1)):
        result = jax.block_until_ready(fn())
    calls = max(1, round(seconds / max(_SECONDS_OF_THE_SHORTEST_CALL, _issued_and_done(fn, 1)[1])))
    device = _accelerator(result)
    del result
    for _ in range(max(num_iters, 1)):
        issued, done = _issued_and_done(fn, calls)
        if device and calls > 1 and issued > _HOST_BOUND * done:
            queued = min(calls, _MOST_QUEUED)
            yield _seconds_behind_other_work(fn, queued, issued * queued / calls, device) * 1e3 / queued
        else:
            yield done * 1e3 / calls


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


def _seconds_behind_other_work(fn: Callable[[], Any], calls: int, issued: float, device: jax.Device) -> float:
    """The seconds of `calls` calls that are issued, in `issued` seconds, while the device does other work.

    They are the difference of two times, with the calls and without them, each the least of a few, as disturbances only
    add to a time.
    """
    work, seconds = _other_work(device)
    steps = 1 + round(_BUSY * issued / seconds)

    def work_and_calls() -> Any:
        for _ in range(steps):
            work()
        for _ in range(calls):
            result = fn()
        return result

    without = min(_issued_and_done(work, steps)[1] for _ in range(3))
    return max(0.0, min(_issued_and_done(work_and_calls, 1)[1] for _ in range(3)) - without)


@lru_cache
def _other_work(device: jax.Device) -> tuple[Callable[[], Any], float]:
    """A function that keeps `device` busy for longer than the host needs to call it, and its seconds."""
    x = jax.device_put(jnp.ones(1 << 22, jnp.float32), device)

    def exponentials(x):
        for _ in range(256):
            x = jnp.exp(-x)
        return x

    work = jax.jit(exponentials).lower(x).compile()
    jax.block_until_ready(work(x))
    return lambda: work(x), min(_issued_and_done(lambda: work(x), 20)[1] for _ in range(3)) / 20


def _accelerator(result: Any) -> jax.Device | None:
    """The device of a result if it works while the host issues further calls, as a CPU does not."""
    devices = next((x.devices() for x in jax.tree.leaves(result) if isinstance(x, jax.Array)), set())
    return next((device for device in devices if device.platform != "cpu"), None)
