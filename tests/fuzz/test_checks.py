"""The search itself: it detects errors, and the code that it prints makes the same call again."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from . import checks
from .calls import Call
from .checks import Program, check, differences
from .failures import FAILURES
from .search import Search
from .transforms import arguments, devices_of

CALL = Call(
    "flash_attention",
    sizes=dict(b=2, s=5, t=9, h=4, g=2, d=8, e=16),
    operands=dict(q="b s h d", k="b t g d", v="b t g e", mask="1 1 s t"),
    options=dict(causal=True, return_lse=True),
    derivative="vjp",
    wrt=("k", "q", "v"),
    maps=({"q": 0, "k": -1, "cotangents": 0},),
    jit=True,
    poison=True,
)


@pytest.fixture(scope="module")
def results():
    found = Program.of(CALL).run(*arguments(CALL))
    return [*map(np.asarray, found[0])], {name: np.asarray(x) for name, x in found[1].items()}


def test_what_is_right(results):
    assert differences(CALL, results) == ""


@pytest.mark.parametrize("name", ("q", "k", "v"))
def test_an_error_is_seen(results, name):
    outputs, gradients = results
    wrong = gradients | {name: gradients[name] * np.float32(1 + 2e-5)}
    assert differences(CALL, (outputs, wrong)).startswith(f"[1]['{name}']: error")


@pytest.mark.parametrize("number", (np.nan, np.inf, 0))
def test_a_wrong_place_is_seen(results, number):
    outputs, gradients = results
    first = outputs[0].copy()
    first[0, 0, -1, 0, 0] = number
    assert "[0][0]" in differences(CALL, ([first, outputs[1]], gradients))


def test_nan_that_is_read_is_seen():
    """A key that some query sees."""
    q, *_ = (x for x in arguments(replace(CALL, poison=False)))
    k = np.asarray(q["k"]).copy()
    seen = np.argwhere(np.asarray(q["mask"])[0, 0, -1])[0, 0]
    k[:, seen] = np.nan
    found = Program.of(CALL).run({**q, "k": k}, *arguments(CALL)[1:])
    assert "not finite" in differences(CALL, (list(map(np.asarray, found[0])), found[1]))


def test_a_call_prints_as_python():
    assert eval(repr(CALL)) == CALL
    assert "NaN" not in CALL.snippet
    names = {}
    exec(CALL.snippet.replace("check(", "call = (", 1), names)
    assert names["call"] == CALL


def test_an_exception_is_a_failure():
    with pytest.raises(AssertionError, match="window is 0"):
        check(replace(CALL, options={"window": 0}))


@pytest.fixture
def a_gpu_that_is_lost(monkeypatch):
    """Programs that fail as after an error of CUDA; the list of those that were run."""
    ran = []

    def run(*args):
        ran.append(args)
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA error: CUDA_ERROR_MISALIGNED_ADDRESS: misaligned address")

    monkeypatch.setattr(checks, "LOST", [])
    monkeypatch.setattr(checks, "program", lambda call: run)
    return ran


def test_an_error_of_cuda_ends_the_search_at_its_call(a_gpu_that_is_lost, tmp_path):
    for log in (None, tmp_path / "log"):
        checks.LOST.clear()
        a_gpu_that_is_lost.clear()
        search = Search("mean_pooling", seconds=60, seed=0, log=log)
        with pytest.raises(AssertionError, match=r"(?s)lost: INTERNAL: CUDA error.*check\(Call\('mean_pooling'"):
            search.run()
        assert len(a_gpu_that_is_lost) == search.programs == 1
        assert not search.failures
    assert "CUDA_ERROR_MISALIGNED_ADDRESS" in log.read_text()


def test_nothing_is_searched_on_a_gpu_that_is_lost(a_gpu_that_is_lost):
    with pytest.raises(checks.GpuLost):
        check(CALL)
    later = Search("mean_pooling", seconds=60, seed=0)
    since = re.escape(f"the GPU of this process is lost since\n{CALL.snippet}")
    for again in (later.run, lambda: check(CALL)):
        with pytest.raises(AssertionError, match=since):
            again()
    assert later.programs == 0 and len(a_gpu_that_is_lost) == 1


def test_a_search_that_is_refused_everything_fails(monkeypatch):
    monkeypatch.setattr(Program, "check", lambda program, call: False)
    search = Search("mean_pooling", seconds=0.1, seed=0)
    with pytest.raises(AssertionError, match=r"mean_pooling: 0 calls of .* every call was refused"):
        search.run()


@pytest.mark.parametrize("call", [call for call in FAILURES if call.mesh is not None], ids=lambda call: call.operation)
def test_a_mesh_is_of_cpu_devices_where_the_default_platform_has_too_few(call, monkeypatch):
    """As on a machine with one GPU, which the last CPU device represents here."""
    all_devices = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda platform=None: all_devices[:-1] if platform else all_devices[-1:])
    assert devices_of(call) == all_devices[:4]
    with jax.default_device(all_devices[-1]):
        assert check(call)
