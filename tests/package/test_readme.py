"""README.md is up to date: its example runs, and its table of implementations matches the registry."""

import re
from pathlib import Path

import pytest

import ejkernel
from ejkernel.kernels._registry import kernel_registry

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
COLUMNS = {"Triton GPU": "triton/gpu", "Mosaic GPU": "pallas/gpu", "Pallas TPU": "pallas/tpu", "XLA": "xla/any"}


@pytest.mark.core
def test_the_example_runs(capsys):
    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    exec(example, {})
    assert "flash_attention on cuda" in capsys.readouterr().out


def row(operation: str) -> str:
    where = lambda name: {f"{entry.platform}/{entry.backend}" for entry in kernel_registry.list_implementations(name)}
    everywhere = where(operation)
    cell = dict.fromkeys(where(f"{operation}_bwd"), "gradient") | dict.fromkeys(everywhere, "✓")
    cells = [cell.get(column, "" if everywhere else "by composition") for column in COLUMNS.values()]
    return re.sub(" +", " ", f"| {operation} | {' | '.join(cells)} |")


def test_the_table_of_implementations_is_that_of_the_registry():
    header = f"| operation | {' | '.join(COLUMNS)} |"
    (table,) = re.findall(rf"^{re.escape(header)}\n\|[-|]+\|\n((?:\|.*\n)+)", README, re.M)
    assert sorted(table.splitlines()) == sorted(map(row, ejkernel.lax.__all__))
