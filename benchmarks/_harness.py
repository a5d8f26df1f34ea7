"""The harness of all benchmarks: it checks results, then times contenders in the same run; _records.py writes records.

A benchmark gives contenders, each a function that prepares one call, and a check of its results. Contenders with right
results are timed interleaved, a batch of queued calls each, so that changes of the device's clock affect all of them.
Contenders that are unavailable, fail or are wrong get a row that says so.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax

from ejkernel.callib.ceilings import Probe, copy_probe, product_probe
from ejkernel.errors import UnsupportedError

_BATCH_SECONDS, _MOST_CALLS = 0.03, 200
_YARDSTICK = "yardstick"

Batch = Callable[[int], None]
"""Queues a number of calls and waits once."""


class Unavailable(Exception):
    """A contender is not available; the message says why."""


@dataclass(frozen=True)
class Prepared:
    """A contender that is compiled and has run: the results of a call, its batch function, and its configs."""

    results: Sequence[Any]
    batch: Batch
    detail: str = ""


@dataclass(frozen=True)
class Contender:
    """One way to compute the case. `prepare` raises `Unavailable` if it is not available.

    `warm` may compile in advance, concurrently with other contenders. It must not run anything: with rivals running
    concurrently, cuDNN in several threads, processes crashed, and a referee's results were wrong once.
    """

    name: str
    prepare: Callable[[], Prepared]
    ours: bool = False
    warm: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Row:
    """The result of one contender.

    Attributes:
        status: "timed", "unavailable", "failed" or "wrong".
        reason: why it was not timed.
        detail: which implementation ran.
        error: its error in units of that of the formula in the same precision.
        milliseconds: the time of a call, as the median over batches.
        quartiles: the quartiles over batches, in milliseconds.
        rate: operations or bytes a second.
        of_ceiling: the rate as a fraction of that of a large matrix product, or of a copy, interleaved with it.
    """

    case: str
    mode: str
    contender: str
    ours: bool
    status: str = "timed"
    reason: str = ""
    detail: str = ""
    error: float | None = None
    milliseconds: float | None = None
    quartiles: tuple[float, float] | None = None
    rate: float | None = None
    of_ceiling: float | None = None


Check = Callable[[Sequence[Any]], float]
"""A function from the results of a call to its error, in units of that of the formula in the same precision."""


def warmed(preparations: Sequence[Callable[[], Any]]) -> None:
    """Compiles all contenders concurrently; an error here is raised again, and reported, in `prepare`."""

    def attempt(preparation: Callable[[], Any]) -> None:
        with suppress(Exception):
            preparation()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(attempt, preparations))


def measure(
    case: str,
    mode: str,
    contenders: Sequence[Contender],
    check: Check,
    *,
    bounds: tuple[float, float],
    work: float,
    yardstick: Probe,
    repeats: int,
    chained: int = 1,
) -> list[Row]:
    """A row for each contender. `bounds` are the largest errors with which ours, and a rival, are timed.

    `work` and the times are those of one call, of which a contender makes `chained` at a time.

    The ceiling, a large product or copy, is interleaved with the contenders, as the clock of a device at its power
    limit changes after a pause.
    """
    rows, ready = {}, {}
    for contender in contenders:
        row = Row(case, mode, contender.name, contender.ours)
        rows[contender.name], batch = _judged(row, contender, check, bounds[0 if contender.ours else 1])
        if batch:
            ready[contender.name] = batch
    if not ready:
        return list(rows.values())
    times = interleaved({**ready, _YARDSTICK: queued(yardstick.function, *yardstick.operands)}, repeats)
    ceiling = _rate(yardstick.work, times.pop(_YARDSTICK))
    for name, seconds in times.items():
        if isinstance(seconds, Exception):
            rows[name] = _failed(rows[name], seconds)
            continue
        quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        low, median, high = (x / chained for x in quartiles)
        rows[name] = replace(
            rows[name],
            milliseconds=median * 1e3,
            quartiles=(low * 1e3, high * 1e3),
            rate=work / median,
            of_ceiling=ceiling and work / median / ceiling,
        )
    return list(rows.values())


@cache
def yardstick(dtype: str | None) -> Probe:
    """A large matrix product in a dtype, or a copy, whose rate is the ceiling."""
    device = jax.devices()[0]
    return product_probe(device, dtype) if dtype else copy_probe(device)


def _rate(work: float, seconds: list[float] | Exception) -> float | None:
    """The rate; None if memory does not suffice for the product or copy beside the case."""
    return None if isinstance(seconds, Exception) else work / statistics.median(seconds)


def _judged(row: Row, contender: Contender, check: Check, bound: float) -> tuple[Row, Batch | None]:
    """Prepares a contender and checks its results: its row, and its batch function if it may be timed."""
    try:
        prepared = contender.prepare()
        row = replace(row, detail=prepared.detail, error=check(prepared.results))
    except (Unavailable, UnsupportedError) as reason:
        return replace(row, status="unavailable", reason=_line(str(reason))), None
    except Exception as error:
        return _failed(row, error), None
    if row.error <= bound:
        return row, prepared.batch
    reason = f"error {row.error:.3g} × that of the formula, over {bound:g} ×"
    return replace(row, status="wrong", reason=reason), None


def _failed(row: Row, error: Exception) -> Row:
    return replace(row, status="failed", reason=_line(f"{type(error).__name__}: {error}"))


def _line(text: str) -> str:
    """The text on one line, cut to a limit."""
    text = " ".join(text.split())
    return text if len(text) <= 400 else text[:400] + " …"


def interleaved(batches: Mapping[str, Batch], repeats: int) -> dict[str, list[float] | Exception]:
    """Seconds a call in each of `repeats` rounds with one batch of every contender, or the error of a contender.

    In a round a contender runs an untimed batch, then a timed one, as the clock of a device at its power limit depends
    on the contender before. Every second round is in reverse order, to cancel what remains of that.
    """
    found: dict[str, Any] = {name: [] for name in batches}
    calls = {}
    for round_ in range(-2, repeats):  # the first round loads the programs, the second says how many calls fill a batch
        for name, batch in list(batches.items())[:: -1 if round_ % 2 else 1]:
            if isinstance(found[name], Exception):
                continue
            count = calls.get(name, 1)
            try:
                if round_ >= 0:
                    batch(count)
                began = time.perf_counter()
                batch(count)
            except Exception as error:
                found[name] = error
                continue
            seconds = (time.perf_counter() - began) / count
            if round_ < 0:
                calls[name] = max(1, min(_MOST_CALLS, math.ceil(_BATCH_SECONDS / seconds)))
            else:
                found[name].append(seconds)
    return found


def queued(function: Callable[..., Any], *arguments: Any) -> Batch:
    """Batches of calls of a jitted function."""

    def batch(calls: int) -> None:
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)

    return batch


def carrying(function: Callable[..., Any], state: Any, *arguments: Any) -> Batch:
    """Batches of calls of a jitted function of a state and arguments; the last result is the state of the next call."""
    states = [state]

    def batch(calls: int) -> None:
        for _ in range(calls):
            states.append(function(states.pop(), *arguments)[-1])
        jax.block_until_ready(states)

    return batch


# --- Output


def show(title: str, rows: Sequence[Row], unit: str = "TFLOP/s") -> None:
    """Prints the rows of one case and mode; the last column is the speedup over the best rival."""
    rivals = [row.milliseconds for row in rows if row.milliseconds and not row.ours]
    best = min(rivals, default=None)
    print(f"\n{title}\n  {'':<22}{'ms':>9}{'quartiles':>20}{unit:>10}{'ceiling':>9}{'error':>8}{'vs best rival':>15}")
    for row in rows:
        if row.status != "timed":
            print(f"  {row.contender:<22}{row.status}: {row.reason}")
            continue
        quartiles = "{:.3f} – {:.3f}".format(*row.quartiles)
        ratio = f"{best / row.milliseconds:.2f} ×" if best else "no rival"
        rate = f"{row.rate / 1e12:>10.3g}" + (f"{row.of_ceiling:>9.0%}" if row.of_ceiling else f"{'unknown':>9}")
        print(f"  {row.contender:<22}{row.milliseconds:>9.3f}{quartiles:>20}{rate}{row.error:>8.2f}{ratio:>15}")


def means(rows: Sequence[Row]) -> Iterator[str]:
    """For each contender of ours and each mode, the geometric mean of the speedups over the best rival."""
    for mode, contender in dict.fromkeys((row.mode, row.contender) for row in rows if row.ours):
        ratios = {}
        for ours in rows:
            if (ours.mode, ours.contender) == (mode, contender) and ours.milliseconds:
                of_case = [row for row in rows if (row.case, row.mode) == (ours.case, mode)]
                rivals = [row.milliseconds for row in of_case if row.milliseconds and not row.ours]
                if rivals:
                    ratios[ours.case] = min(rivals) / ours.milliseconds
        if ratios:
            least = min(ratios, key=ratios.get)
            mean = statistics.geometric_mean(ratios.values())
            told = f"{contender}, {mode}: {mean:.3f} × the best rival in {len(ratios)} cases"
            yield f"{told}, {ratios[least]:.3f} × in {least}"
