"""Benchmarks count the work they say they count, and time nothing whose numbers are wrong."""

import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import callib
from ejkernel.callib.ceilings import Probe
from ejkernel.types import ATTENTION_SHAPES, AttentionShape

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
harness, attention, rivals, entry = map(
    importlib.import_module, ("_harness", "_attention", "_attention_rivals", "flash_attention")
)

SMALL = AttentionShape("small", 4, 2, 16, 24, 2, 48, 48, window=(20, 0), softcap=5.0, sinks=1)


# --- Work


def test_the_convention():
    shape = ATTENTION_SHAPES["llama3-8b"].at(2, 1024)
    assert attention.operations(shape, "fwd") == 4 * 2 * 32 * 1024 * 1024 * 128 / 2
    assert attention.operations(replace(shape, causal=False), "fwd") == 4 * 2 * 32 * 1024 * 1024 * 128
    forward = attention.operations(shape, "fwd")
    assert [attention.operations(shape, mode) / forward for mode in ("bwd", "fwd_bwd", "jvp")] == [2.5, 3.5, 2.5]


def test_values_of_another_size_count_as_they_are():
    shape = ATTENTION_SHAPES["deepseek-v3"].at(1, 512)
    assert attention.operations(shape, "fwd") == 2 * 128 * 512 * 512 * (192 + 128) / 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (3, 0), (5, 2), (None, 1), (0, 0), (4, None)])
@pytest.mark.parametrize("lengths", [(16, 16), (5, 16), (16, 5)])
def test_pairs_are_those_of_the_mask(causal, window, lengths):
    seq_q, seq_k = lengths
    shape = replace(SMALL, seq_q=seq_q, seq_k=seq_k, causal=causal, window=window)
    position, column = np.arange(seq_q)[:, None] + seq_k - seq_q, np.arange(seq_k)
    left, right = window
    visible = (column <= position) | (not causal)
    visible = visible & (left is None or column >= position - left) & (right is None or column <= position + right)
    assert shape.pairs == visible.sum()
    if window != (None, None) or seq_q != seq_k:
        assert attention.operations(shape, "fwd") == 2 * 4 * visible.sum() * 2 * (16 + 24)


def test_every_shape_is_under_its_name_and_has_whole_groups():
    for name, shape in ATTENTION_SHAPES.items():
        assert shape.name == name and shape.heads % shape.kv_heads == 0
        assert str(shape).startswith(f"{name}: b{shape.batch} s{shape.seq_q} ")


# --- The gate

HALF_AT_NIGHT = [(mode, "bfloat16") for mode in list(attention.WORK)[1:]]


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        pytest.param(mode, dtype, marks=pytest.mark.slow if (mode, dtype) in HALF_AT_NIGHT else ())
        for mode in attention.WORK
        for dtype in ("float32", "bfloat16")
    ],
)
def test_the_gate_passes_what_is_right_and_stops_what_is_not(mode, dtype):
    given = attention.inputs(SMALL, jnp.dtype(dtype))
    judge = attention.gate(SMALL, mode, given)
    ours, formula, *_ = rivals.contenders(SMALL, mode, given, ["auto"])
    prepared = ours.prepare()
    assert judge(prepared.results) <= 3 and judge(formula.prepare().results) <= 3
    assert "flash_attention" in prepared.detail and "KernelConfig(" in prepared.detail
    *right, last = prepared.results
    assert judge([*right, last * 1.1]) > 10
    assert not judge([*right, last * jnp.nan]) <= 10


@pytest.mark.parametrize("mode", attention.WORK)
def test_what_is_done_side_by_side_runs_no_contender(mode, monkeypatch):
    """Where contenders ran at once, processes crashed."""
    ours, *_ = rivals.contenders(SMALL, mode, attention.inputs(SMALL, jnp.dtype("float32")), ["auto"])
    monkeypatch.setattr(jax, "block_until_ready", breaks)
    monkeypatch.setattr(jax.stages.Compiled, "__call__", breaks)
    harness.warmed([ours.warm])
    ours.warm()  # tells of a failure, which `warmed` leaves to the preparation
    with pytest.raises(RuntimeError):
        ours.prepare()


def prepared(results, batch):
    return lambda: harness.Prepared(results, batch)


def forbidden(calls):
    raise AssertionError("timed although its numbers are wrong")


def unavailable():
    raise harness.Unavailable("there is none here")


def breaks(*_):
    raise RuntimeError("out of\n memory")


def measured(*contenders, repeats=3, yardstick=Probe(lambda: None, (), 1e9)):
    given = dict(gate=lambda results: results[0], bounds=(2.0, 10.0), work=1e9, repeats=repeats)
    return harness.measure("case", "fwd", contenders, yardstick=yardstick, **given)


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
    (row,) = measured(right, yardstick=Probe(breaks, (), 1e9))
    assert row.status == "timed" and row.of_ceiling is None
    harness.show("title", [row])
    assert "unknown" in capsys.readouterr().out


# --- The whole


def test_a_run_leaves_its_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(callib.ceilings._SIZES, "cpu", (2**16, 64))
    asked = (
        "--device cpu --shapes gpt-oss-local@1x32,vit-large@1x24 --modes fwd --repeats 2 --platforms auto,xla,triton"
    )
    entry.main([*asked.split(), "--out", str(tmp_path / "results")])
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


def test_another_version_takes_part_from_a_process_of_its_own(tmp_path, monkeypatch):
    """Here it is this one, under the names that an installation gives it."""
    installed = tmp_path / "before" / "ejkernel"
    installed.mkdir(parents=True)
    files = {file.name: file for file in Path(ejkernel.__path__[0]).iterdir()}
    for name, file in (files | {"lowering": ejkernel.lowering.__path__[0]}).items():
        (installed / name).symlink_to(file)
    monkeypatch.setitem(callib.ceilings._SIZES, "cpu", (2**16, 64))
    monkeypatch.setenv("EJKERNEL_BEFORE", str(tmp_path / "before"))
    asked = ["--device", "cpu", "--shapes", "h16-d64@1x32", "--modes", "fwd,fwd_bwd", "--repeats", "1"]
    entry.main([*asked, "--rivals", "ejkernel before", "--out", str(tmp_path / "results")])
    (file,) = (tmp_path / "results").iterdir()
    rows = [row for row in json.loads(file.read_text())["rows"] if row["contender"] == "ejkernel before"]
    assert [row["status"] for row in rows] == ["timed", "timed"]
    assert "flash_attention_bwd" in rows[1]["detail"]


@pytest.mark.parametrize(
    "wrong", ["--shapes llama9", "--shapes llama3-8b@1", "--modes sideways", "--platforms metal", "--repeats 0"]
)
def test_wrong_arguments_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as raised:
        entry.main(wrong.split())
    assert raised.value.code == 2 and wrong.split()[1] in capsys.readouterr().err


# --- Recurrences


def test_gradients_of_a_recurrence_come_by_name():
    """A rival returns them in an order of its own."""
    call = importlib.import_module("_recurrence").call(lambda x: x["v"] * x["k"] ** 2, "fwd_bwd")
    assert call({"v": 2.0, "k": 3.0}, 1.0) == [18.0, 12.0, 9.0]


# --- Operations over groups of rows


@pytest.mark.parametrize("mode", ("fwd", "bwd", "fwd_bwd"))
@pytest.mark.parametrize("name", ("grouped_matmul", "mean_pooling"))
def test_groups_are_judged_and_timed(name, mode, monkeypatch):
    """Ours and a rival of JAX pass the gate, which stops a result that is wrong in one of the groups it looks at."""
    benchmark = importlib.import_module(name)
    types = importlib.import_module(f"ejkernel.types.{name}")
    small = {
        "grouped_matmul": lambda: types.GroupedMatmulShape("small", 256, 64, 96, 4),
        "mean_pooling": lambda: types.MeanPoolingShape("small", 256, 128, 4),
    }[name]()
    monkeypatch.setitem(callib.ceilings._SIZES, "cpu", (2**16, 64))
    arguments = SimpleNamespace(platforms=["auto"], repeats=2)
    ours, rival, *_ = benchmark.case(small, mode, arguments)
    assert (ours.status, rival.status) == ("timed", "timed") and name in ours.detail
    wrong = lambda *a, **k: 1.1 * getattr(ejkernel.modules, name)(*a, **k)
    monkeypatch.setattr(benchmark, name, wrong)
    assert benchmark.case(small, mode, arguments)[0].status == "wrong"


# --- Records


def test_every_record_says_what_it_is_evidence_for():
    """The index names each file, and no other; so do the documents, which take their figures from them."""
    root = Path(__file__).parents[1]
    records = {path.name for path in (root / "benchmarks/results").iterdir()} - {"README.md"}
    names = lambda page: set(re.findall(r"[a-z_0-9]+-[a-z0-9-]*\d{8}[0-9-]*\.(?:json|txt)", page.read_text()))
    assert names(root / "benchmarks/results/README.md") == records
    pages = [root / "README.md", *(root / "benchmarks").glob("*.md"), *(root / "docs").glob("*.md")]
    assert set().union(*map(names, pages)) <= records
