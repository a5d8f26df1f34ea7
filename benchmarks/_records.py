"""Records of measurements, one file for each run in benchmarks/results: writing, and reading for documents."""

import datetime
import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from ejkernel.callib import Ceilings
from ejkernel.cli.info import versions

from ._harness import Row

RESULTS = Path(__file__).parent / "results"


# --- Written


def result_file(benchmark: str, out: Path = RESULTS) -> Path:
    """The file for the record of a run that starts now."""
    kind = re.sub(r"[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")
    return out / f"{benchmark}-{kind}-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}.json"


def save(file: Path, rows: Sequence[Row], ceilings: Ceilings, evidence: str, convention: str) -> None:
    """Writes the rows so far with the device, the versions and the date."""
    state = dict(platform=jax.devices()[0].platform, state=_device_state(), ceilings=asdict(ceilings))
    save_record(file, evidence, convention, **state, rows=[asdict(row) for row in rows])


def save_record(
    file: Path, evidence: str, convention: str, *, device: str | None = None, rows: Sequence[Any], **more: Any
) -> None:
    """Writes a record: device, date, versions, what it is evidence for, the convention of its numbers, and its rows."""
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device or jax.devices()[0].device_kind,
        "versions": versions("torch", "tokamax", "libtpu"),
        "evidence": evidence,
        "convention": convention,
        **more,
        "rows": rows,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    beside.replace(file)


def _device_state() -> str | None:
    """Clocks, power and driver of the GPUs as they are after the run; None without NVIDIA's tool."""
    fields = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None


# --- Read


@dataclass(frozen=True)
class Record:
    """A record of a run, which is one file in benchmarks/results."""

    name: str

    @cached_property
    def content(self) -> dict[str, Any]:
        """The content of the file."""
        return json.loads((RESULTS / self.name).read_text())

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the record, which are measurements."""
        return self.content["rows"]

    @property
    def timed(self) -> list[dict[str, Any]]:
        """The rows of contenders that were timed."""
        return [row for row in self.rows if row.get("status") == "timed"]

    @property
    def measured(self) -> str:
        """Device, date and versions, as a sentence."""
        versions = ", ".join(
            f"{name} {version}"
            for name, version in self.content["versions"].items()
            if version and name not in ("python", "numpy", "ejkernel")
        )
        return f"{self.content['device']}, {self.content['date'][:10]}: {versions}."


def records() -> list[Record]:
    """All records by name."""
    return [Record(path.name) for path in sorted(RESULTS.glob("*.json"))]
