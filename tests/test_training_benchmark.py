"""Training beside the release (here a copy of this library), and the cost of first calls: whole runs at CPU sizes."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import _process, first_call, training
from tests.benchmarked import installed

TINY = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --head-dim 16 --feed-forward 48 --vocabulary 64 --batch 2"
RELEASE = {
    "__init__.py": "",
    "kernels/__init__.py": "",
    "kernels/_triton/__init__.py": "",
    "kernels/_triton/flash_attention.py": "def flash_attention(q, k, v, **options): return 2 * q",
    "ops.py": "FwdParams = dict",
}


def record_of(main, asked, folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmark", *asked.split(), "--out", str(folder)])
    outcome = main()
    (file,) = folder.iterdir()
    return outcome, json.loads(file.read_text())


@pytest.mark.slow
def test_training_beside_the_release(tmp_path, monkeypatch, capsys):
    installed(tmp_path / "release")
    monkeypatch.setenv("EJKERNEL_RELEASE", str(tmp_path / "release"))
    asked = f"{TINY} --length 24 --steps 12 --repeats 2"
    outcome, record = record_of(training.main, asked, tmp_path / "results", monkeypatch)
    ours, release, cudnn = record["rows"]
    assert ours["status"] == release["status"] == "timed" and outcome == 1  # cuDNN is missing
    assert ours["loss"] < np.log(64) - 0.05 and release["loss_difference"] < 1e-6
    assert "flash_attention_bwd" in ours["detail"] and release["detail"] == "xla"
    assert cudnn["status"] == "failed" and "cuDNN" in cudnn["reason"]
    assert record["sizes"]["length"] == 24 and "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("ratio, difference, met", [(1.6, 0.001, True), (1.4, 0.001, False), (1.6, 0.02, False)])
def test_bars_of_training(ratio, difference, met):
    rows = [dict(contender=training.OURS), dict(contender=training.RELEASE, ratio=ratio, loss_difference=0.3)]
    assert training.is_met([*rows, dict(contender=training.CUDNN, loss_difference=difference)]) == met
    assert not training.is_met([*rows, dict(contender=training.CUDNN, status="failed")])


def test_training_needs_steps_for_each_round(monkeypatch, tmp_path):
    with pytest.raises(SystemExit):
        record_of(training.main, "--steps 3 --repeats 3", tmp_path, monkeypatch)


def test_the_release_runs_in_its_process_and_not_this_library(tmp_path, monkeypatch):
    for name, text in RELEASE.items():
        file = tmp_path / "release" / "ejkernel" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setenv("EJKERNEL_RELEASE", str(tmp_path / "release"))
    q = np.asarray(jnp.arange(64.0).reshape(1, 4, 1, 16), jnp.bfloat16)
    for name in "qkv":
        np.save(tmp_path / f"{name}.npy", q.view(np.uint16))
    request = dict(folder=str(tmp_path), causal=True, window=None, calls=1)
    assert "num_warps" in _process.asked("_release", "EJKERNEL_RELEASE", request)["config"]
    np.testing.assert_array_equal(np.load(tmp_path / "o.npy").view(jnp.bfloat16), 2 * q)


@pytest.mark.slow
def test_first_calls(tmp_path, monkeypatch):
    for attempt in "123":  # other work of the machine may slow down one of the processes
        _, record = record_of(first_call.main, "gemma --length 64", tmp_path / attempt, monkeypatch)
        assert [row["what"] for row in record["rows"]] == ["cold, gemma", "tuned, gemma", "warm, gemma"]
        cold, tuned, warm = record["rows"]
        if warm["compile"] < cold["compile"] / 2:
            break
    assert all(row[part] > 0 for row in record["rows"] for part in ("start", *first_call.PARTS))
    assert warm["compile"] < cold["compile"] / 2 and "added" in tuned and cold["searches"] == warm["searches"] == 0


def test_bars_of_first_calls():
    row = dict(tuning=0.0, searches=2, trace=0.5, lower=1.1, compile=3.5, run=0.0, added=5.9)
    assert [bar.split(":")[0] for bar in first_call.over("cold", row)] == ["lower", "compile"]
    assert first_call.over("tuned", row) == [] and first_call.over("tuned", row | dict(searches=1)) != []
    assert first_call.over("warm", row) == ["both: 5.10 s over 0.5 s"]
