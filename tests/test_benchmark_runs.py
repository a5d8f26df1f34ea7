"""A run of a benchmark: who is timed, in which order, and what is displayed and recorded."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import _driver, report
from benchmarks import _harness as harness
from ejkernel import callib
from ejkernel.callib.ceilings import Probe
from tests.benchmarked import breaks, installed, prepared


def forbidden(calls):
    raise AssertionError("timed although its numbers are wrong")


def unavailable():
    raise harness.Unavailable("there is none here")


def measured(*contenders, repeats=3, yardstick=Probe(lambda: None, (), 1e9), chained=1):
    given = dict(check=lambda results: results[0], bounds=(2.0, 10.0), work=1e9, repeats=repeats)
    return harness.measure("case", "fwd", contenders, yardstick=yardstick, chained=chained, **given)


def test_nothing_is_timed_whose_numbers_are_wrong():
    for error, ours in ((2.5, True), (11.0, False), (float("nan"), False)):
        (row,) = measured(harness.Contender("wrong", prepared([error], forbidden), ours=ours))
        assert row.status == "wrong" and row.milliseconds is None and "that of the formula" in row.reason


def test_every_contender_has_a_row(capsys):
    rows = measured(
        harness.Contender("right", prepared([1.0], lambda calls: None), ours=True),
        harness.Contender("none", unavailable),
        harness.Contender("broken", breaks),
        harness.Contender("breaks later", prepared([1.0], breaks)),
    )
    assert [row.status for row in rows] == ["timed", "unavailable", "failed", "failed"]
    assert [row.reason for row in rows] == ["", "there is none here", *["RuntimeError: out of memory"] * 2]
    harness.show("title", rows)
    assert "no rival" in capsys.readouterr().out


def test_contenders_are_interleaved_in_both_orders():
    order = []
    batches = {name: lambda calls, name=name: order.append((name, calls)) for name in "ab"}
    found = harness.interleaved(batches, repeats=3)
    assert "".join(name for name, _ in order) == "abba" + "aabb" + "bbaa" + "aabb" and [
        len(times) for times in found.values()
    ] == [3, 3]
    assert order[0] == ("a", 1) and order[-1] == ("b", harness._MOST_CALLS)


def test_the_yardstick_is_interleaved_with_the_contenders(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def takes(seconds):
        now[0] += seconds

    right = harness.Contender("right", prepared([1.0], lambda calls: takes(0.002 * calls)), ours=True)
    (row,) = measured(right, yardstick=Probe(lambda: takes(0.001), (), 1e9))
    assert row.of_ceiling == pytest.approx(0.5)
    (row,) = measured(right, yardstick=Probe(lambda: takes(0.001), (), 1e9), chained=2)
    assert row.of_ceiling == pytest.approx(1.0) and row.milliseconds == pytest.approx(1.0)
    (row,) = measured(right, yardstick=Probe(breaks, (), 1e9))
    assert row.status == "timed" and row.of_ceiling is None
    harness.show("title", [row])
    assert "unknown" in capsys.readouterr().out


# --- The whole


def test_a_run_leaves_its_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(callib.ceilings._SIZES, "cpu", (2**16, 64))
    asked = "flash_attention --device cpu --shapes gpt-oss-local@1x32,vit-large@1x24 --modes fwd --repeats 2"
    asked += " --platforms auto,xla,triton"
    _driver.main([*asked.split(), "--out", str(tmp_path / "results")])
    (file,) = (tmp_path / "results").iterdir()
    record = json.loads(file.read_text())
    assert record["platform"] == "cpu" and record["versions"]["jax"] and record["ceilings"]["matmul"]["float32"] > 0
    rows = {(row["case"].split(":")[0], row["contender"]): row for row in record["rows"]}
    for name in ("gpt-oss-local", "vit-large"):
        assert rows[name, "ejkernel auto"]["status"] == rows[name, "ejkernel xla"]["status"] == "timed"
        assert rows[name, "jax.nn cudnn"]["status"] == "unavailable"
    assert "no implementation on cpu" in rows["vit-large", "ejkernel triton"]["reason"]
    assert rows["vit-large", "jax.nn xla"]["status"] == "timed"
    assert rows["gpt-oss-local", "jax.nn xla"]["reason"] == "jax.nn.dot_product_attention has no sinks"
    assert "vs best rival" in capsys.readouterr().out


def test_another_version_runs_in_its_own_process(tmp_path, monkeypatch):
    """Here it is this version, installed under the release's names."""
    installed(tmp_path / "before")
    monkeypatch.setitem(callib.ceilings._SIZES, "cpu", (2**16, 64))
    monkeypatch.setenv("EJKERNEL_BEFORE", str(tmp_path / "before"))
    asked = [
        "flash_attention",
        "--device",
        "cpu",
        "--shapes",
        "h16-d64@1x32",
        "--modes",
        "fwd,fwd_bwd",
        "--repeats",
        "1",
    ]
    _driver.main([*asked, "--rivals", "ejkernel before", "--out", str(tmp_path / "results")])
    (file,) = (tmp_path / "results").iterdir()
    rows = [row for row in json.loads(file.read_text())["rows"] if row["contender"] == "ejkernel before"]
    assert [row["status"] for row in rows] == ["timed", "timed"]
    assert "flash_attention_bwd" in rows[1]["detail"]


@pytest.mark.parametrize(
    "wrong",
    [
        "flash_attention --shapes llama9",
        "flash_attention --shapes llama3-8b@1",
        "page_attention --shapes b32-4k@1x16",
        "flash_attention --modes sideways",
        "flash_attention --platforms metal",
        "flash_attention --repeats 0",
        "flash_distraction --repeats 1",
    ],
)
def test_wrong_arguments_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as raised:
        _driver.main(wrong.split())
    operation, _, value = wrong.split()
    said = f"{raised.value.code} {capsys.readouterr().err}"
    assert raised.value.code and (value in said or operation in said)


# --- Records


ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", list(report.documents()), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_have_the_tables_of_the_records(path):
    assert path.read_text() == report.documents()[path], "python -m benchmarks.report"


def test_every_record_describes_its_measurement():
    """All have one form, with measured values in fields; and figures in documents cite existing records."""
    records = {path.name: json.loads(path.read_text()) for path in report.RESULTS.iterdir() if path.suffix == ".json"}
    assert {path.name for path in report.RESULTS.iterdir()} == records.keys() | {"README.md"}
    for name, record in records.items():
        assert {"date", "device", "versions", "evidence", "convention", "rows"} <= record.keys(), name
        assert record["evidence"] and record["rows"], name
        assert all(isinstance(row, dict) and "line" not in row for row in record["rows"]), name
        assert [row for row in record["rows"] if _only_told(row)] == [], name
    names = lambda page: set(re.findall(r"[a-z_0-9]+-[a-z0-9-]*\d{8}[0-9-]*\.(?:json|txt)", page.read_text()))
    pages = [ROOT / "README.md", *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert set().union(*map(names, pages)) <= records.keys()


def _only_told(row):
    """Whether the row has its measured numbers only in the text of `what`."""
    numbers = [value for value in row.values() if type(value) in (int, float)]
    return re.search(r"\d\.\d", row.get("what", "")) and not numbers


def test_a_number_only_in_the_text_is_found():
    assert _only_told({"section": "A", "what": "d128 1x16384 full 192, 64, 2 3.000 (2.909)"})
    assert not _only_told({"section": "A", "what": "d128 1x16384 full", "ms": 3.0})
    assert not _only_told({"section": "A", "what": "ptxas 13.0", "spill_bytes": 0})


def test_every_record_is_cited_by_a_document():
    """A record that no document cites supports no statement."""
    assert [name for name, pages in report.citations().items() if not pages] == []
