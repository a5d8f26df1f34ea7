"""`ejkernel tune --processes`: calls are compiled by several processes, and give what one process gives."""

import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from shown import HEURISTIC, TUNED, Shown, key_of, ones

from ejkernel.__main__ import main
from ejkernel.cli import _measured, _workers
from ejkernel.cli._measured import how_many_processes
from ejkernel.cli._workers import results_of_processes
from ejkernel.ops import Invocation, load_table, record_invocation, save_invocations
from ejkernel.types import Target

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


@pytest.fixture(autouse=True)
def own_files(tmp_path, monkeypatch):
    monkeypatch.setattr("ejkernel.ops.registry._recorded", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(PREALLOCATE, "")


@pytest.fixture
def tuned(tmp_path, capsys):
    """Tunes calls of kernels with two processes: the exit status, the rows and the table."""

    def tune(*kernels, modules=()):
        for kernel in kernels:
            record_invocation(kernel, Invocation(kernel, (ones(),), {}))
        save_invocations(file := tmp_path / "calls.json")
        given = ["--recorded", file, "--out", tmp_path / "table.json", *(("--import", *modules) if modules else ())]
        status = main(["tune", *map(str, given), "--processes", "2"])
        rows = [line for line in capsys.readouterr().out.splitlines() if "f32[4,4]" in line]
        return status, rows, load_table(tmp_path / "table.json")

    return tune


@pytest.fixture
def here(monkeypatch):
    """Replaces the processes by calls in this one: how many there would have been at once, and the results."""
    replaced = SimpleNamespace(at_once=[], results=[])

    def results(function, calls, at_once, without):
        replaced.at_once.append(at_once)
        for key, arguments in calls.items():
            replaced.results.append(function(*arguments))
            yield key, replaced.results[-1]

    monkeypatch.setattr(_measured, "results_of_processes", results)
    return replaced


def test_two_processes_find_the_entries_of_one_and_a_third_is_killed(tuned, tmp_path, monkeypatch):
    def started(function, arguments, of=_workers._started):
        receiver, process = of(function, arguments)
        if "killed" in str(arguments):
            process.kill()
        return receiver, process

    (tmp_path / "kernels_elsewhere.py").write_text("from shown import Shown\nclass Elsewhere(Shown): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_workers, "_started", started)
    from kernels_elsewhere import Elsewhere

    kernels = Elsewhere("first"), Elsewhere("killed"), Elsewhere("last")
    status, rows, table = tuned(*kernels, modules=["kernels_elsewhere"])
    assert status == 1 and [row.split()[0] for row in rows] == ["first", "killed", "last"]
    assert "not measured: its process was ended by SIGKILL" in rows[1]
    found = [table.get(key_of(kernel, ones())) for kernel in kernels]
    assert len(table) == 2 and found[1] is None and {found[0], found[2]} <= {HEURISTIC, TUNED}


class Crowded(Shown):
    """A kernel of which some configs have too little memory beside another process."""

    processes, which = [], (TUNED,)

    def run(self, a, *, cfg):
        if self.processes[-1] > 1 and cfg in self.which:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 64 bytes")
        return super().run(a, cfg=cfg)


class AllCrowded(Crowded):
    which = (HEURISTIC, TUNED)


class Failing(Shown):
    def run(self, a, *, cfg):
        raise ValueError("no block divides it")


def test_what_lacks_memory_beside_others_is_measured_again_alone(tuned, here, monkeypatch):
    monkeypatch.setattr(Crowded, "processes", here.at_once)
    status, rows, table = tuned(Crowded("first"), AllCrowded("second"), Shown("third"))
    assert status == 0 and len(rows) == len(table) == 3 and here.at_once == [2, 1]
    beside, alone = here.results[:3], here.results[3:]
    assert [bool(result.entry) for result in beside] == [True, False, True]
    assert [result.lacked_memory for result in beside] == [True, False, False]
    assert len(alone) == 2 and all(result.entry and not result.lacked_memory for result in alone)


def test_a_call_that_fails_alone_too_has_a_row_with_the_reason(tuned, here):
    status, rows, table = tuned(Failing("failing"), Shown("works"))
    assert status == 1 and len(table) == 1 and here.at_once == [2, 1]
    assert "not measured: failing@v1: cannot be measured: no block divides it" in rows[0]


def test_an_interrupt_ends_all_processes(monkeypatch):
    ignored = []

    def interrupted(receivers):
        for process in multiprocessing.active_children():
            signals = Path(f"/proc/{process.pid}/status")
            ignored.extend(line for line in signals.read_text().splitlines() if line.startswith("SigIgn"))
        raise KeyboardInterrupt

    monkeypatch.setattr(_workers, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(results_of_processes(time.sleep, {"a": (60,), "b": (60,)}, 2, str))
    assert multiprocessing.active_children() == []
    assert len(ignored) == 2 and all(int(line.split()[1], 16) & 2 for line in ignored)  # 2: SIGINT


# --- How many


@pytest.mark.parametrize(
    "platform, asked, calls, processes",
    [("cuda", 8, 35, 8), ("cuda", 8, 3, 3), ("cpu", 2, 35, 2), ("rocm", 1, 35, 1), ("tpu", 1, 35, 1)],
)
def test_the_number_of_processes(monkeypatch, platform, asked, calls, processes):
    monkeypatch.setattr(_measured, "device_target", lambda: Target(platform))
    assert how_many_processes(asked, calls) == processes


def test_wrong_numbers_of_processes_are_told_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(_measured, "device_target", lambda: Target("tpu", "TPU v5e"))
    given = ["tune", "--model", "vit-large", "--out", str(tmp_path / "table.json"), "--processes"]
    for number, message in {
        "0": "'0' is not a positive number",
        "-1": "'-1' is not a positive number",
        "x": "'x' is not a positive number",
        "2": "--processes 2: a TPU can be used by one process at a time",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            main([*given, number])
        out, err = capsys.readouterr()
        assert message in err and (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize("processes, user, found", [("2", None, "false"), ("2", "true", "true"), ("1", None, None)])
def test_processes_do_not_take_most_of_a_gpu_at_start(monkeypatch, capsys, processes, user, found):
    if user is None:
        monkeypatch.delenv(PREALLOCATE)
    else:
        monkeypatch.setenv(PREALLOCATE, user)
    assert main(["tune", "--model", "vit-large", "--sizes", "1x8", "--dry-run", "--processes", processes]) == 0
    assert "flash_attention" in capsys.readouterr().out and os.environ.get(PREALLOCATE) == found
