"""`ejkernel doctor`: which operations it finds right, and which wrong."""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.__main__ import main
from ejkernel.cli import doctor
from ejkernel.cli._checks import Check, _error
from ejkernel.errors import short_type
from ejkernel.kernels._registry import kernel_registry, supported_if
from ejkernel.modules._operation import OPERATIONS
from ejkernel.types import Platform, Target
from tests.cli.doctor_checks import A100, H200, needs_jax_triton, told

ALL_IS_WELL = "All that should run here does, and its numbers are right."


@pytest.fixture
def one_operation(monkeypatch):
    """Only mean_pooling, with a registry that may be added to."""
    monkeypatch.setattr(doctor, "OPERATIONS", {"mean_pooling": OPERATIONS["mean_pooling"]})
    monkeypatch.setattr(kernel_registry, "_registry", dict(kernel_registry._registry))


WITH_A_GRADIENT_AND_WITHOUT = ("grouped_matmul", "page_attention")


@pytest.mark.parametrize(
    "names", [WITH_A_GRADIENT_AND_WITHOUT, pytest.param(tuple(OPERATIONS), marks=pytest.mark.slow, id="all")]
)
def test_every_operation_is_right_here(capsys, monkeypatch, names):
    """Two operations; at night all. `tests/test_registry.py` always calls every example."""
    monkeypatch.setattr(doctor, "OPERATIONS", {name: OPERATIONS[name] for name in names})
    status, rows, last = told(capsys)
    assert last == [ALL_IS_WELL] and status == 0
    assert set(rows) == {(name, "xla/any") for name in names}
    for (name, _), row in rows.items():
        *numbers, verdict = row.split()[2:]
        passes = 2 if OPERATIONS[name].algorithm.differentiable else 1
        assert verdict == "right" and len(numbers) == 2 * passes and all(float(x) >= 0 for x in numbers)


@pytest.mark.core
def test_an_implementation_that_fails_is_a_row_and_a_status(capsys, one_operation):
    @kernel_registry.register("mean_pooling", Platform.CUTE, "any", priority=500)
    def broken(*operands, spec, config):
        raise ValueError("made up\nand more of it")

    status, rows, last = told(capsys)
    assert status == 1 and last == ["1 of 3 calls fail or are wrong."]
    row = rows["mean_pooling", "cute/any"]
    assert row.endswith("fails with ValueError: made up")
    assert rows["mean_pooling", "xla/any"].endswith("right")


@pytest.mark.parametrize("by", [1.05, np.nan])
def test_wrong_numbers_are_a_row_and_a_status(capsys, one_operation, by):
    right = kernel_registry.find("mean_pooling_bwd", "xla").implementation

    @kernel_registry.register("mean_pooling_bwd", Platform.CUTE, "any", priority=500)
    def wrong(primals, outputs, cotangents, *, wrt, spec, config):
        return [(by * x).astype(x.dtype) for x in right(primals, outputs, cotangents, wrt=wrt, spec=spec)]

    status, rows, last = told(capsys)
    assert status == 1 and last == ["1 of 3 calls fail or are wrong."]
    assert rows["mean_pooling", "cute/any"].endswith("gradient wrong, over 3 times the error of the formula")


def test_unsupported_calls_are_shown_and_not_failures(capsys, one_operation):
    @kernel_registry.register("mean_pooling", Platform.CUTE, "any", priority=500)
    @supported_if(lambda spec, operands, target: "not\n today" if operands.segments is not None else None)
    def refusing(*operands, spec, config):
        raise ValueError("was called")

    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "  cute/any    none: not today\n" in out and "was called" not in out


def test_shadowed_implementations_are_reported(capsys, one_operation):
    right = kernel_registry.find("mean_pooling", "xla").implementation

    @kernel_registry.register("mean_pooling", Platform.XLA, "cpu", priority=500)
    def first(*operands, spec, config):
        return right(*operands, spec=spec)

    status, rows, _ = told(capsys)
    assert status == 0 and rows["mean_pooling", "xla/cpu"].endswith("  right")
    assert "forward xla/cpu of priority 500 takes the call first; gradient right" in rows["mean_pooling", "xla/any"]


def test_an_operation_that_cannot_be_asked_is_a_row(capsys, one_operation, monkeypatch):
    def example():
        raise TypeError("no such array\nat all")

    monkeypatch.setattr(OPERATIONS["mean_pooling"], "example", example)
    status, rows, last = told(capsys)
    assert status == 1 and last == ["2 of 2 calls fail or are wrong."]
    assert rows["mean_pooling", "any"].endswith("cannot be called: TypeError: no such array")


def test_a_formula_that_fails_is_a_row(capsys, one_operation, monkeypatch):
    monkeypatch.delattr("ejkernel.kernels._xla.mean_pooling.reference")
    status, rows, _ = told(capsys)
    assert status == 1 and "fails with AttributeError" in rows["mean_pooling", "xla/any"]


def test_errors_are_in_units_of_that_of_the_formula():
    exact = {"x": np.array([1.0, 2.0, -np.inf])}
    formula = {"x": np.array([1.0, 2.01, -np.inf], np.float32)}
    of = lambda *values: _error({"x": np.array(values, np.float32)}, exact, formula, np.float32)
    assert of(1, 2, -np.inf) == 0 and 1.9 < of(1.02, 2, -np.inf) < 2.1
    assert of(1, np.nan, -np.inf) == of(1, 2, 0) == of(np.inf, 2, -np.inf) == np.inf
    near = {"x": np.array([1.0, 2.0, -np.inf], np.float32)}
    assert _error(formula, exact, near, np.float32) == np.inf  # no error beyond that of rounding is allowed


def test_errors_of_float32_are_in_units_of_rounding_to_the_dtype_of_products():
    exact, near = {"state": np.array([1.001, 3.003])}, {"state": np.array([1.001, 3.003], np.float32)}
    far = {"state": np.array([1.001, 3.004], np.float32)}
    assert _error(far, exact, near, np.float32) > 1e3 and 0.1 < _error(far, exact, near, jnp.bfloat16) < 1
    nearly, off = {"state": np.array([1.00001])}, {"state": np.array([1.004], np.float32)}
    assert 1 < _error(off, nearly, nearly, jnp.bfloat16) < 3  # not the distance of 1.00001 from 1, a hundredth of that
    assert Check("state_space_v2", Target("cpu")).products_dtype == jnp.bfloat16
    assert Check("quantized_matmul", Target("cpu")).products_dtype == jnp.bfloat16


# --- The examples


@pytest.mark.core
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_has_an_example_of_the_types_that_accelerators_are_for(operation):
    given = OPERATIONS[operation].example()
    arrays = [x for x in given.values() if hasattr(x, "shape")]
    floats = {x.dtype for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)}
    assert floats - {jnp.dtype(jnp.float32)} == {jnp.dtype(jnp.bfloat16)}  # states and decays may be float32
    assert sum(x.size for x in arrays) < 2**18, list(map(short_type, arrays))


@needs_jax_triton
@pytest.mark.parametrize(
    "target", [H200, A100, Target("rocm", "AMD Instinct MI300X"), Target("tpu", "TPU v5 lite")], ids=str
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_kernel_for_a_device_takes_the_example(operation, target):
    """Kernels for its hardware and generation: an example that a kernel refuses would not check it.

    The decoding kernels are those of ragged_decode_attention, and those of flash_mla for few queries those of
    multi_latent_page_attention, whose examples they take.
    """
    for candidates in Check(operation, target).candidates.values():
        fitting = [
            (str(entry.platform), reason)
            for entry, reason in candidates
            if entry.backend in ("any", target.backend)
            and "capability" not in f"{reason}"
            and "Mosaic" not in f"{reason}"
            and "decoding kernels" not in f"{reason}"
            and "with keys and values of all heads the call costs less" not in f"{reason}"
        ]
        assert fitting and [reason for _, reason in fitting if reason] == []
