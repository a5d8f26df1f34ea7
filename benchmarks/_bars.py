"""Benchmarks with bars to meet: rows, the printed table, and the record."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ._records import result_file, save_record


@dataclass(frozen=True)
class Row:
    """A cost of ours and of the rival. The bar is the largest ratio of the two, or without a rival the largest cost."""

    name: str
    ours: float
    rival: float | None
    bar: float | None
    unit: str

    @property
    def measure(self) -> float:
        return self.ours if self.rival is None else self.ours / self.rival

    @property
    def met(self) -> bool:
        return self.bar is None or self.measure <= self.bar


def conclude(benchmark: str, rows: Sequence[Row], convention: str, out: Path) -> int:
    """Prints the table and writes the record; 1 if a bar is not met."""
    print(f"{'':<38}{'ours':>12}{'rival':>12}{'ratio':>8}{'bar':>9}")
    for row in rows:
        rival, ratio = ("", "") if row.rival is None else (f"{row.rival:.1f} {row.unit}", f"{row.measure:.2f}")
        bar = "" if row.bar is None else f"{row.bar:g}" + f" {row.unit}" * (row.rival is None)
        over = "" if row.met else "  over the bar"
        print(f"{row.name:<38}{f'{row.ours:.1f} {row.unit}':>12}{rival:>12}{ratio:>8}{bar:>9}{over}")
    file = result_file(benchmark, out)
    host = dict(cores=os.cpu_count(), load=os.getloadavg())
    save_record(
        file,
        f"{benchmark}, which has bars to meet",
        convention,
        **host,
        rows=[asdict(row) | {"met": row.met} for row in rows],
    )
    print(f"kept in {file}")
    return int(not all(row.met for row in rows))
