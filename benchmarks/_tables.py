"""Tables of contenders: for each case the time and rate of ours, and the best of the others."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ._records import Record

MODES = {
    "fwd": "forward",
    "bwd": "backward",
    "fwd_bwd": "forward + backward",
    "jvp": "forward and tangent",
    "step": "step of decoding",
}

Row = dict[str, Any]


def best_of(rows: Sequence[Row], ours: bool, among: Callable[[str], bool] = lambda name: True) -> Row | None:
    """The fastest row of ours, or of the rivals, among some contenders."""
    found = [row for row in rows if row["ours"] == ours and among(row["contender"])]
    return min(found, key=lambda row: row["milliseconds"], default=None)


def geometric_mean(ratios: Sequence[float]) -> float:
    """The geometric mean of at least one ratio."""
    return math.prod(ratios) ** (1 / len(ratios))


def table(rows: Sequence[Row], unit: str) -> Iterator[str]:
    """A line for each case: for each mode the time and rate of ours, the best rival's time, and the ratio."""
    modes = [mode for mode in MODES if any(row["mode"] == mode for row in rows)]
    columns = [f"{MODES[mode]}, ms | {unit} | best other | ×" for mode in modes]
    yield f"| case | {' | '.join(columns)} |"
    yield "|---" * (1 + 4 * len(modes)) + "|"
    ratios: dict[str, list[float]] = {mode: [] for mode in modes}
    for case in dict.fromkeys(row["case"] for row in rows):
        of_mode = lambda mode, case=case: [row for row in rows if (row["case"], row["mode"]) == (case, mode)]
        cells = [_cells(of_mode(mode), ratios[mode]) for mode in modes]
        yield f"| {case} | {' | '.join(cells)} |"
    if all(ratios.values()):
        means = (f" | | | {geometric_mean(found):.2f}" for found in ratios.values())
        yield f"| geometric mean of {', '.join(str(len(found)) for found in ratios.values())} |{' |'.join(means)} |"


def _cells(rows: Sequence[Row], ratios: list[float]) -> str:
    """The cells of one case and mode, whose ratio is added to `ratios`; a rival's cells are empty if none was timed."""
    ours, other = best_of(rows, True), best_of(rows, False)
    if ours is None:
        return " | | | " if other is None else f" | | {other['contender']} {other['milliseconds']:.3g} | "
    rate = ours["rate"] / 1e12
    mine = f"{ours['milliseconds']:.3g} | {f'{rate:.0f}' if rate >= 100 else f'{rate:.3g}'}"
    if other is None:
        return f"{mine} | | "
    ratios.append(other["milliseconds"] / ours["milliseconds"])
    return f"{mine} | {other['contender']} {other['milliseconds']:.3g} | {ratios[-1]:.2f}"


def unit_of(record: Record) -> str:
    """The unit of rates of a record: TB/s for calls bound by memory."""
    return "TB/s" if record.content["convention"].startswith(("bytes", "a chain of 8 calls; bytes")) else "TFLOP/s"
