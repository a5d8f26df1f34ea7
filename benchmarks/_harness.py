"""What all benchmarks share: first the numbers, then the time, with rivals in the same run; records are in _records.py.

A benchmark hands over contenders, each a function that prepares one call, and a check of the numbers of its results.
Those whose numbers are right are timed interleaved, a batch of queued calls each, so that what the clock of the device
does in the meantime is shared by all. Nothing is left out silently: who is unavailable, fails or is wrong gets a row
that says so.
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
"""Queues that many calls and waits once."""


class Unavailable(Exception):
    """Why a contender does not take part."""


@dataclass(frozen=True)
class Prepared:
    """A contender that is compiled and has run: the results of a call, how to repeat it, and what it is made of."""

    results: Sequence[Any]
    batch: Batch
    detail: str = ""


@dataclass(frozen=True)
class Contender:
    """One way to compute the case. `prepare` raises `Unavailable` where it cannot be had.

    What takes long in it may be done before, in `warm`, side by side with that of others: to compile, not to run. Where
    rivals ran side by side, too, cuDNN in several threads, processes crashed, and a referee's numbers were wrong once.
    """

    name: str
    prepare: Callable[[], Prepared]
    ours: bool = False
    warm: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Row:
    """What came of one contender.

    Attributes:
        status: "timed", "unavailable", "failed" or "wrong".
        reason: why it was not timed.
        detail: which implementation ran.
        error: the error of its numbers in units of that of the formula in the same precision.
        milliseconds: of a call, the median over batches.
        quartiles: of the batches, in milliseconds.
        rate: operations a second.
        of_ceiling: the rate as a share of that of a large product of matrices, or of a copy, interleaved with it.
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
"""From the results of a call to its error in units of that of the formula in the same precision."""


def warmed(preparations: Sequence[Callable[[], Any]]) -> None:
    """Compiles side by side what takes part; what fails here fails again, and is told, when it is prepared."""

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
    """A row for each contender. `bounds` are the largest errors that ours and that a rival may have and be timed.

    `work` and the times are those of one call, of which a contender makes `chained` at a time.

    The yardstick, what rates are given as shares of, is interleaved with them: the clock of a device that is short of
    power is another when it has rested.
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
    """A large product of matrices of a dtype, or a copy."""
    device = jax.devices()[0]
    return product_probe(device, dtype) if dtype else copy_probe(device)


def _rate(work: float, seconds: list[float] | Exception) -> float | None:
    """None where memory does not suffice for the yardstick beside the case."""
    return None if isinstance(seconds, Exception) else work / statistics.median(seconds)


def _judged(row: Row, contender: Contender, check: Check, bound: float) -> tuple[Row, Batch | None]:
    """Prepares a contender and looks at its numbers; it may be timed if there is a batch."""
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
    """In one line that is not too long."""
    text = " ".join(text.split())
    return text if len(text) <= 400 else text[:400] + " …"


def interleaved(batches: Mapping[str, Batch], repeats: int) -> dict[str, list[float] | Exception]:
    """Seconds a call, for each of `repeats` rounds in which every contender has one batch; or what it failed with.

    In a round a contender has a batch that is not timed, then one that is: the clock of a device that is short of power
    is what the contender before has left. Every other round goes backwards for what is left of that.
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


# --- What is shown


def show(title: str, rows: Sequence[Row], unit: str = "TFLOP/s") -> None:
    """Prints the rows of one case and mode; the last column is how many times faster than the best rival one is."""
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
    """For each contender of ours and each mode, how many times faster than the best rival: the geometric mean."""
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
