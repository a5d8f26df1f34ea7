"""The linear recurrence in Triton: every kernel's masks and indices, by the interpreter, against float64."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from ejkernel.types.recurrence import RecurrenceConfig
from tests.gpu.recurrence_cases import (
    CASES,
    Case,
    check,
    check_tangent,
    differentiable,
    directions,
    formula,
    like,
    poisoned,
    tangent_of_formula,
)

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton._recurrence import (  # noqa: E402
    gradients,
    recurrence,
    recurrence_bwd,
    recurrence_jvp,
    splits,
    tangent,
)
from ejkernel.kernels._triton._recurrence import outputs as outputs_of_chunks  # noqa: E402

from . import interpreter  # noqa: E402

CONFIG = dict(chunk_size=16, block_v=32, block_k=16)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_the_interpreter(case):
    """Both variants of the forward, the backward and the tangent, in float32; tokens of no sequence hold NaN."""
    check_all(*case.make(40, jnp.float32))


@pytest.mark.parametrize(
    "gates",
    [pytest.param(dict(g=1.0, g_gamma=0.5), id="heads")]
    + [
        pytest.param(gates, id=name, marks=pytest.mark.slow)
        for name, gates in {"features": dict(gk=1.0), "both": dict(gk=0.5, gv=0.5, g=0.5), "none": {}}.items()
    ],
)
def test_features_in_blocks_in_the_interpreter(gates, monkeypatch):
    """More features of keys than a program takes at once, the last block being half full."""
    monkeypatch.setattr(gradients, "MOST_UNSPLIT_FEATURES", 0)
    monkeypatch.setattr(tangent, "MOST_UNSPLIT_FEATURES", dict.fromkeys(tangent.MOST_UNSPLIT_FEATURES, 0))
    monkeypatch.setattr(gradients, "ROWS", 16)
    monkeypatch.setattr(tangent, "ROWS", dict.fromkeys(tangent.ROWS, 16))
    check_all(*Case("blocks", gates, B=1, H=2, G=1).make(20, jnp.float32))


@pytest.mark.parametrize("gates", [dict(gk=0.5, g=0.5), dict(gk=0.5, gv=0.5)], ids="-".join)
@pytest.mark.parametrize("reverse", (False, True))
def test_all_features_of_values_in_a_program_in_the_interpreter(reverse, gates, monkeypatch):
    """Weights of pairs are computed once for all blocks of values, of which the last is half full.

    Where values decay, too, each block of them has a program.
    """
    monkeypatch.setattr(outputs_of_chunks, "PROGRAMS", 0)
    case = Case("values", gates, B=1, H=2, G=2 if "gv" in gates else 1, D=40, V=80, reverse=reverse)
    x, spec = case.make(20, jnp.float32)
    config, wrt = RecurrenceConfig(**CONFIG, algorithm="chunks"), ("q", "k", "v", "gk")
    found = recurrence(*poisoned(x), spec=spec, config=config)
    cotangents = like(found)
    of_x = recurrence_bwd(poisoned(x), None, cotangents, wrt=wrt, spec=spec, config=config)
    exact, rounded = formula(x, spec, cotangents, jnp.float64), formula(x, spec, cotangents)
    check((found, dict(zip(wrt, of_x, strict=True))), exact, rounded, jnp.float32)


def check_all(x, spec):
    """Both variants of the forward, the backward and the tangent against the formula."""
    wrt = differentiable(x)
    fused, outputs = (
        recurrence(*poisoned(x), spec=spec, config=RecurrenceConfig(**CONFIG, algorithm=how))
        for how in ("fused_chunks", "chunks")
    )
    cotangents = like(outputs)
    cotangents_of_x = recurrence_bwd(
        poisoned(x), None, cotangents, wrt=wrt, spec=spec, config=RecurrenceConfig(**CONFIG)
    )
    exact, rounded = formula(x, spec, cotangents, jnp.float64), formula(x, spec, cotangents)
    for found in (fused, outputs):
        check((found, dict(zip(wrt, cotangents_of_x, strict=True))), exact, rounded, jnp.float32)
    tangents = directions(x)
    found = recurrence_jvp(poisoned(x), None, tangents, spec=spec, config=RecurrenceConfig(**CONFIG))
    wanted = (tangent_of_formula(x, spec, tangents, dtype) for dtype in (jnp.float64, None))
    check_tangent(found, *wanted, jnp.float32)


@pytest.mark.parametrize("reverse", (False, True))
def test_single_tokens_in_the_interpreter(reverse):
    x, spec = Case("steps", dict(gk=1.0, gv=1.0, g=1.0, g_gamma=1.0), reverse=reverse).make(3, jnp.float32)
    found = recurrence(*x, spec=spec, config=RecurrenceConfig(block_v=32, algorithm="steps"))
    exact, rounded = (formula(x, spec, like(found), dtype)[0] for dtype in (jnp.float64, None))
    check((found, {}), (exact, {}), (rounded, {}), jnp.float32)


@pytest.mark.parametrize("gate, dtype", [("gk", jnp.float32), ("gv", jnp.float32), ("g", jnp.float16)])
def test_a_gate_of_minus_infinity_in_the_interpreter(gate, dtype):
    """It resets the state; differences of sums that contain it are NaN."""
    x, spec = Case("resets", {gate: 0.5}, B=1, H=1, G=1, D=16, V=16, resets=0.1).make(20, dtype)
    wrt = differentiable(x)
    found = recurrence(*x, spec=spec, config=RecurrenceConfig(**CONFIG, algorithm="chunks"))
    cotangents = like(found)
    gradients = recurrence_bwd(x, None, cotangents, wrt=wrt, spec=spec, config=RecurrenceConfig(**CONFIG))
    exact, rounded = (formula(x, spec, cotangents, dtype) for dtype in (jnp.float64, None))
    check((found, dict(zip(wrt, gradients, strict=True))), exact, rounded, dtype)


@pytest.mark.slow
def test_splits_in_the_interpreter(monkeypatch):
    """A long sequence of few heads is split, forwards and backwards in time."""
    monkeypatch.setattr(splits, "SHORTEST", 16)
    x, spec = Case("long", dict(gk=0.5, g_gamma=0.5), B=1, reverse=True).make(32, jnp.float32)
    assert splits.number_of(x) == 2
    wrt = differentiable(x)
    found = recurrence(*x, spec=spec, config=RecurrenceConfig(**CONFIG, algorithm="fused_chunks"))
    cotangents = like(found)
    gradients = recurrence_bwd(x, None, cotangents, wrt=wrt, spec=spec, config=RecurrenceConfig(**CONFIG))
    exact, rounded = (formula(x, spec, cotangents, dtype) for dtype in (jnp.float64, None))
    check((found, dict(zip(wrt, gradients, strict=True))), exact, rounded, jnp.float32)


@pytest.mark.parametrize("shortest", (16, 1024), ids=("splits", "whole"))
def test_states_alone_in_the_interpreter(shortest, monkeypatch):
    """Without an output the final state has the same bits, and so has the cotangent of the initial state alone.

    The output is zeros.
    """
    monkeypatch.setattr(splits, "SHORTEST", shortest)
    config = RecurrenceConfig(**CONFIG, algorithm="chunks")
    for ends in ((),) if shortest == 16 else ((), (0.1, 0.8, 1.5)):
        x, spec = Case("states", dict(gk=0.5), B=1, H=2, G=1, ends=ends).make(32, jnp.float32)
        whole, alone = (
            recurrence(*poisoned(x), spec=replace(spec, return_output=found), config=config) for found in (True, False)
        )
        assert (alone.final_state == whole.final_state).all() and not alone.o.any()
        cotangents = like(whole)
        backward = lambda wrt, x=x, spec=spec, ct=cotangents: recurrence_bwd(
            poisoned(x), None, ct, wrt=wrt, spec=spec, config=config
        )
        assert (backward(("initial_state",))[0] == backward(differentiable(x))[-1]).all()
