"""Behaviour common to all commands: no traceback if a reader closes the pipe, or if there are no devices."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ejkernel.__main__ import main

EXPLAIN = "explain flash_attention --q 1,64,4,64"
TRACES = ("Traceback", "Exception ignored", "Error:")


def started(arguments, **how):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **how.pop("environment", {})}
    command = [sys.executable, "-m", "ejkernel", *arguments.split()]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", **how
    )


def traces(err):
    """Lines of a traceback; JAX also writes to stderr."""
    return [line for line in err.splitlines() if any(trace in line for trace in TRACES)]


# --- A reader that has gone


@pytest.mark.parametrize("arguments", ["info", EXPLAIN, "tune --model vit-large --dry-run"])
def test_a_reader_that_has_gone_ends_a_command_quietly(arguments):
    process = started(arguments)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 128 + 13 and traces(err) == []


def test_a_reader_of_the_help_that_has_gone():
    process = started("--help")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() in (0, 128 + 13) and traces(err) == []  # argparse itself may ignore it


def test_a_table_that_cannot_be_written_is_no_broken_pipe(capsys, monkeypatch, tmp_path):
    """tune reports file errors, and a BrokenPipeError is an OSError too."""

    def gone(*given):
        raise BrokenPipeError

    monkeypatch.setattr("ejkernel.cli.tune.print_table", gone)
    monkeypatch.setattr(os, "dup2", lambda *given: None)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=lambda: None, fileno=lambda: -1))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(flush=lambda: None, fileno=lambda: -1))
    assert main(["tune", "--model", "vit-large", "--dry-run"]) == 128 + 13


def test_signs_that_the_terminal_does_not_have_are_replaced():
    out, err = started("info", environment={"PYTHONIOENCODING": "ascii"}).communicate()
    assert traces(err) == [] and "? cpu" in out


# --- No device


@pytest.mark.parametrize("platforms", ["no_such_platform", "rocm"])
@pytest.mark.parametrize("arguments", ["calibrate", "demo --steps 1", EXPLAIN, "tune --model vit-large"])
def test_a_missing_device_is_reported_in_one_line(tmp_path, arguments, platforms):
    out, err = (process := started(arguments, environment={"JAX_PLATFORMS": platforms}, cwd=tmp_path)).communicate()
    assert process.returncode == 2 and out == "" and traces(err) == []
    command = arguments.partition(" ")[0]
    assert err.splitlines()[-1].startswith(f"ejkernel {command}: JAX_PLATFORMS={platforms}: ")


@pytest.mark.parametrize("platforms", ["no_such_platform", "rocm"])
def test_info_works_without_a_device(platforms):
    out, err = (process := started("info", environment={"JAX_PLATFORMS": platforms})).communicate()
    assert process.returncode == 0 and traces(err) == []
    assert f"cpu   none: JAX_PLATFORMS={platforms} leaves it out" in out and "Tuned tables" in out


def test_an_error_that_is_of_no_device_is_not_taken_for_one(monkeypatch):
    def fails(arguments):
        raise RuntimeError("something else")

    monkeypatch.setattr("ejkernel.cli.info.run", fails)
    with pytest.raises(RuntimeError, match="something else"):
        main(["info"])
