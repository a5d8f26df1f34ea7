"""`ejkernel tune`: recorded calls and models' shapes become tables; errors are reported."""

import json
import sys
import tempfile

import jax
import jax.numpy as jnp
import pytest
from shown import HEURISTIC, TUNED, Shown, executor, key_of, ones, ran

import ejkernel
from ejkernel.__main__ import main
from ejkernel.ops import (
    Invocation,
    PersistentCache,
    Tuner,
    load_table,
    overlay_cache,
    record_invocation,
    recording,
    save_invocations,
)


class Improvable(Shown):
    """A kernel whose heuristic config is slow."""

    def run(self, a, *, cfg):
        steps = 20_000 if cfg == HEURISTIC else 0
        return super().run(jax.lax.fori_loop(0, steps, lambda i, a: jnp.where(i < 0, a + 1, a), a), cfg=cfg)


class Failing(Shown):
    def run(self, a, *, cfg):
        raise ValueError("no block divides it")


@pytest.fixture(autouse=True)
def own_calls_and_lock(tmp_path, monkeypatch):
    monkeypatch.setattr("ejkernel.ops.registry._recorded", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def calls(tmp_path):
    """Makes a file of recorded calls of kernels."""

    def record(*kernels):
        for kernel in kernels:
            record_invocation(kernel, Invocation(kernel, (ones(),), {}))
        save_invocations(tmp_path / "calls.json")
        return str(tmp_path / "calls.json")

    return record


def tuned(capsys, *arguments):
    """The exit status and the output."""
    return main(["tune", *map(str, arguments)]), capsys.readouterr().out


def refused(capsys, *arguments):
    """The one-line error for wrong arguments."""
    with pytest.raises(SystemExit) as raised:
        main(["tune", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert raised.value.code == 2 and out == "" and err.count("\n") == 1
    return err


# --- Recorded calls


def test_recorded_calls_become_a_table_that_an_executor_uses(capsys, calls, tmp_path):
    kernel, table = Improvable("improvable"), tmp_path / "new" / "table.json"
    status, out = tuned(capsys, "--recorded", calls(kernel), "--out", table)
    assert status == 0
    header, row, kept = out.splitlines()[-3:]
    assert header.split() == ["operation", "ms", "heuristic", "gain", "config", "call"]
    name, milliseconds, heuristic, gain, _, config, call = row.split()
    assert (name, config, call) == ("improvable", "Config(block=2)", "f32[4,4]")
    assert float(heuristic) > 2 * float(milliseconds) and float(gain) > 2
    assert kept == f"kept in {table}"
    with overlay_cache(load_table(table)):
        assert ran(executor(autotune=False)(kernel, ones())) == TUNED


def test_without_a_table_programs_on_this_machine_find_the_configs(capsys, calls):
    kernel = Improvable("found_here")
    assert tuned(capsys, "--recorded", calls(kernel))[0] == 0
    events = []
    run = executor(persistent=PersistentCache(), autotune=False, on_event=lambda event, *_: events.append(event))
    assert ran(run(kernel, ones())) == TUNED and events == ["persistent_hit"]


def test_a_kernel_of_a_module_is_found_once_that_is_imported(capsys, calls, tmp_path, monkeypatch):
    (tmp_path / "my_kernels.py").write_text("from shown import Shown\nclass Mine(Shown): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_kernels

    file = calls(my_kernels.Mine("mine"))
    del sys.modules["my_kernels"]
    with pytest.warns(UserWarning, match="my_kernels:Mine is not imported here"):
        assert tuned(capsys, "--recorded", file) == (1, "there is nothing to tune\n")
    status, out = tuned(capsys, "--recorded", file, "--import", "my_kernels", "--dry-run")
    assert status == 0 and "mine" in out
    assert "No module named 'no_such_module'" in refused(capsys, "--recorded", file, "--import", "no_such_module")


def test_a_failing_call_is_reported_and_the_others_are_kept(capsys, calls, tmp_path):
    file = calls(Failing("failing"), Improvable("works"))
    status, out = tuned(capsys, "--recorded", file, "--out", tmp_path / "table.json")
    assert status == 1 and "not measured: failing@v1: cannot be measured: no block divides it" in out
    assert load_table(tmp_path / "table.json").get(key_of(Improvable("works"), ones())) == TUNED


def test_with_several_processes_nothing_is_measured(capsys, calls, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    status, out = tuned(capsys, "--recorded", calls(Improvable("many")))
    assert status == 1 and "not measured: configs are not measured with several processes" in out


# --- Shapes of models


def test_the_calls_of_a_model_are_those_that_its_gradient_makes(capsys, tmp_path):
    table = tmp_path / "table.json"
    assert tuned(capsys, "--model", "vit-large", "--sizes", "1x8", "--dtype", "float32", "--out", table)[0] == 0
    q = jax.ShapeDtypeStruct((1, 8, 16, 64), jnp.float32)
    with recording() as made:
        jax.eval_shape(jax.grad(lambda x: ejkernel.lax.flash_attention(*x).sum()), (q, q, q))
    found = load_table(table)
    for operation, (call,) in ((name, list(of.values())) for name, of in made.items()):
        inv = Invocation(*call)
        config = found.get(inv.kernel.key_builder(inv))
        assert config is None if "_jvp" in operation else config in inv.kernel.config_space(inv), operation


@pytest.mark.parametrize("policy", ["autotune", "heuristics", "error"])
def test_a_dry_run_shows_what_would_be_measured(capsys, monkeypatch, tmp_path, policy):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", policy)
    monkeypatch.setattr(Tuner, "measure", lambda *_: pytest.fail("measured"))
    status, out = tuned(capsys, "--model", "gpt-oss-local", "--dry-run", "--out", tmp_path / "table.json")
    rows = [line.split()[:2] for line in out.splitlines()]
    assert status == 0 and rows[0] == ["operation", "configs"]
    assert [operation for operation, _ in rows[1:]] == ["flash_attention", "flash_attention_bwd"] * 3
    assert all(int(configs) >= 1 for _, configs in rows[1:])
    assert "bf16[4,4096,64,64]" in out and "bf16[8,2048,64,64]" in out and "bf16[2,8192,64,64]" in out
    assert "window=(127, 0)" in out and not (tmp_path / "table.json").exists()


def test_operations_are_chosen_by_name(capsys):
    status, out = tuned(capsys, "--model", "vit-large", "--operations", "flash_attention_jvp", "--dry-run")
    assert status == 0 and [line.split()[0] for line in out.splitlines()] == ["operation", *["flash_attention_jvp"] * 3]


# --- Merging, and what is refused


def test_tables_are_merged(capsys, tmp_path):
    for name in "ab":
        PersistentCache(tmp_path / name).put(f"key of {name}", TUNED)
    files = [PersistentCache(tmp_path / name).path_of() for name in "ab"]
    status, out = tuned(capsys, "--merge", *files, "--out", tmp_path / "all.json")
    assert (status, out) == (0, f"2 configs added to {tmp_path / 'all.json'}\n")
    assert len(load_table(tmp_path / "all.json")) == 2


def test_wrong_arguments_are_told_in_one_line(capsys, calls, tmp_path):
    file = calls(Improvable("refused"))
    (notes := tmp_path / "notes.json").write_text(json.dumps({"mine": 1}))
    assert "required" in refused(capsys)
    assert "--merge needs --out" in refused(capsys, "--merge", notes)
    assert "No such file" in refused(capsys, "--recorded", tmp_path / "none.json")
    assert f"{notes}: this is no file of 'ejkernel calls 1'" in refused(capsys, "--recorded", notes)
    assert f"{notes}: this is no file of 'ejkernel configs 1'" in refused(capsys, "--recorded", file, "--out", notes)
    assert "no call of conv; there are refused" in refused(capsys, "--recorded", file, "--operations", "conv")
    assert "'4x' is not a list of batches and lengths" in refused(capsys, "--model", "vit-large", "--sizes", "4x")
    assert "File exists" in refused(capsys, "--recorded", file, "--out", notes / "table.json")
    assert json.loads(notes.read_text()) == {"mine": 1}
