"""The search itself: it sees errors, and what it prints makes the same call again."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from .calls import Call
from .checks import Program, check, differences
from .failures import FAILURES
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


@pytest.mark.parametrize("call", [call for call in FAILURES if call.mesh is not None], ids=lambda call: call.operation)
def test_a_mesh_is_of_cpu_devices_where_the_default_platform_has_too_few(call, monkeypatch):
    """As on a machine with one GPU, for which the last CPU device stands here."""
    all_devices = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda platform=None: all_devices[:-1] if platform else all_devices[-1:])
    assert devices_of(call) == all_devices[:4]
    with jax.default_device(all_devices[-1]):
        assert check(call)
