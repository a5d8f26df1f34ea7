"""`ejkernel doctor`: what it finds right, what it finds wrong, and what it says of versions and machines."""

import glob
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.__main__ import main
from ejkernel.cli import _versions, doctor
from ejkernel.cli._checks import PASSES, Check, Outcome, _error
from ejkernel.errors import short_type
from ejkernel.kernels._registry import kernel_registry, supported_if
from ejkernel.modules._operation import OPERATIONS
from ejkernel.types import Platform, Target

needs_jax_triton = pytest.mark.skipif(not importlib.util.find_spec("jax_triton"), reason="jax-triton is not installed")
H200, A100 = Target("cuda", "NVIDIA H200"), Target("cuda", "NVIDIA A100-SXM4-80GB")
ALL_IS_WELL = "All that should run here does, and its numbers are right."


def told(capsys):
    """The exit status, the rows of the calls by operation and implementation, and the last lines."""
    status = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("operation "))
    end = lines.index("", start)
    return status, {tuple(line.split()[:2]): line for line in lines[start + 1 : end]}, lines[end + 1 :]


@pytest.fixture
def one_operation(monkeypatch):
    """Only mean_pooling, with a registry that may be added to."""
    monkeypatch.setattr(doctor, "OPERATIONS", {"mean_pooling": OPERATIONS["mean_pooling"]})
    monkeypatch.setattr(kernel_registry, "_registry", dict(kernel_registry._registry))


def test_every_operation_is_right_here(capsys):
    status, rows, last = told(capsys)
    assert last == [ALL_IS_WELL] and status == 0
    assert set(rows) == {(name, "xla/any") for name in OPERATIONS}
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


def test_what_is_refused_is_shown_and_is_not_wrong(capsys, one_operation):
    @kernel_registry.register("mean_pooling", Platform.CUTE, "any", priority=500)
    @supported_if(lambda spec, operands, target: "not\n today" if operands.segments is not None else None)
    def refusing(*operands, spec, config):
        raise ValueError("was called")

    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "  cute/any    none: not today\n" in out and "was called" not in out


def test_what_nothing_reaches_is_said(capsys, one_operation):
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
    of = lambda *values: _error({"x": np.array(values, np.float32)}, exact, formula)
    assert of(1, 2, -np.inf) == 0 and 1.9 < of(1.02, 2, -np.inf) < 2.1
    assert of(1, np.nan, -np.inf) == of(1, 2, 0) == of(np.inf, 2, -np.inf) == np.inf
    near = {"x": np.array([1.0, 2.0, -np.inf], np.float32)}
    assert _error(formula, exact, near) == np.inf  # nothing but the exact one is allowed


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
    """Those for its hardware, and of a generation of it: an example that a kernel refuses is no check of it.

    The kernels of few queries are those of ragged_decode_attention, whose example they take.
    """
    for candidates in Check(operation, target).candidates.values():
        fitting = [
            (str(entry.platform), reason)
            for entry, reason in candidates
            if entry.backend in ("any", target.backend)
            and "capability" not in f"{reason}"
            and "Mosaic" not in f"{reason}"
            and "few queries" not in f"{reason}"
        ]
        assert fitting and [reason for _, reason in fitting if reason] == []


# --- What is wrong with a machine


def outcomes(**of_triton):
    """Of an operation with kernels in Triton and in Mosaic GPU, the latter for its gradient alone."""
    taken, refused = Outcome(1.0, 1.0), Outcome(reason="jax-triton cannot be imported (no such module)")
    triton = {name: taken if of_triton.get(name, True) else refused for name in PASSES}
    return {
        ("op", "pallas/gpu"): {"gradient": taken},
        ("op", "triton/gpu"): triton,
        ("op", "xla/any"): dict.fromkeys(PASSES, taken),
    }


def test_a_gpu_without_triton_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda package: None)
    monkeypatch.setattr(sys, "version_info", (3, 12))
    slow, triton = doctor._complaints(outcomes(forward=False, gradient=False), H200)
    assert slow == "XLA computes what has no kernel here: op forward."
    assert triton.startswith("Triton cannot be used: jax-triton cannot be imported (no such module); install what it")
    assert "pip install -U 'triton" in triton and "'jax-triton" in triton
    monkeypatch.setattr(sys, "version_info", (3, 11))
    assert (
        "jax-triton 0.4 needs Python 3.12 or later"
        in list(doctor._complaints(outcomes(forward=False, gradient=False), H200))[1]
    )


def test_a_gpu_with_its_kernels_is_well_and_a_cpu_needs_none():
    assert list(doctor._complaints(outcomes(), H200)) == []
    assert list(doctor._complaints(outcomes(forward=False, gradient=False), Target("cpu", "cpu"))) == []
    assert list(doctor._complaints(outcomes(forward=False), H200)) == [
        "XLA computes what has no kernel here: op forward."
    ]


def test_an_operation_without_kernels_for_a_device_is_not_missed_there():
    of_xla = {
        ("op", "xla/any"): {"forward": Outcome(1.0, 1.0)},
        ("op", "pallas/tpu"): {"forward": Outcome(reason="tpu")},
    }
    assert list(doctor._complaints(of_xla, H200)) == []


@needs_jax_triton
def test_where_jax_triton_cannot_be_imported_its_kernels_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    for candidates in Check("mean_pooling", H200).candidates.values():
        reasons = {f"{entry.platform}/{entry.backend}": reason for entry, reason in candidates}
        assert "jax-triton cannot be " in reasons["triton/gpu"] and reasons["xla/any"] is None


def test_a_device_that_jax_does_not_see(monkeypatch):
    devices = {platform: "none: no plugin" for platform in ("cuda", "rocm", "tpu")}
    monkeypatch.setattr(glob, "glob", lambda pattern: ["/dev/nvidia0"] if "nvidia" in pattern else [])
    monkeypatch.setattr(doctor, "version", lambda package: None)
    (told,) = doctor._unused_devices(devices)
    assert told.startswith("There is an NVIDIA GPU, but JAX sees none: no plugin; install") and "jax[cuda13]" in told
    monkeypatch.setattr(doctor, "version", lambda package: "1.0")
    assert list(doctor._unused_devices(devices)) == ["There is an NVIDIA GPU, but JAX sees none: no plugin"]
    assert list(doctor._unused_devices(dict(devices, cuda="1 × NVIDIA H200"))) == []
    assert list(doctor._unused_devices(dict(devices, cuda="none: JAX_PLATFORMS=cpu leaves it out"))) == []


# --- Versions


@pytest.fixture
def installed(monkeypatch):
    """Sets what is installed: name → version and requirements."""

    def install(**packages):
        packages = {name.replace("_", "-"): of for name, of in packages.items()}
        monkeypatch.setattr(_versions, "version", lambda name: packages.get(name, (None,))[0])
        monkeypatch.setattr(_versions.metadata, "requires", lambda name: packages[name][1:])
        return [f"{package} {what}" for package, what in _versions.misfits(list(packages))]

    return install


def test_packages_say_themselves_what_they_want_of_others(installed):
    assert installed(jax_triton=("0.4.1", "triton>=3.7", "absl-py"), triton=("3.6.0",)) == [
        "jax-triton wants triton>=3.7, and 3.6.0 is installed"
    ]
    assert installed(jax_triton=("0.4.1", "triton (>=3.7)"), triton=("3.9.0",)) == []
    assert installed(jax=("0.11.2", 'libtpu==0.0.48.*; extra == "tpu"'), libtpu=("0.0.48.1",)) == []
    assert installed(jax=("0.11.2", 'libtpu==0.0.48.*; extra == "tpu"')) == []
    assert installed(jax=("0.11.2", 'libtpu==0.0.48.*; extra == "tpu"'), libtpu=("0.0.52",)) == [
        "jax wants libtpu==0.0.48.*, and 0.0.52 is installed"
    ]
    assert (
        installed(jax=("0.11.2", "jaxlib<=0.11.2,>=0.11.2", 'jaxlib==0.11.1; extra == "ci"'), jaxlib=("0.11.2",)) == []
    )


def test_what_is_always_required_must_be_there(installed):
    packages = dict(jax_cuda13_plugin=("0.11.2", "jax-cuda13-pjrt==0.11.2"), jaxlib=("0.11.2",))
    assert installed(**packages, jax_cuda13_pjrt=(None,)) == [
        "jax-cuda13-plugin wants jax-cuda13-pjrt==0.11.2, and none is installed"
    ]


def test_a_plugin_for_cuda_has_the_version_of_jaxlib(installed):
    assert installed(jax_cuda13_plugin=("0.12.0.1",), jaxlib=("0.11.2",)) == [
        "jax-cuda13-plugin is not used by jaxlib 0.11.2, whose version it has to have"
    ]
    assert installed(jax_cuda13_plugin=("0.11.2",), jaxlib=("0.11.2",)) == []


@pytest.mark.parametrize(
    ("found", "wanted", "fits"),
    [
        ("3.6.0", ">=3.6", True),
        ("3.6.0", "!=3.6", False),
        ("3.10", ">=3.9,<4", True),
        ("0.12.0.1", "<0.12.1", True),
        ("0.12.0.1", "<=0.12", False),
        ("0.13.0.dev20261101", "<0.13", False),
        ("2.4", "~=2.2", True),
        ("3.0", "~=2.2", False),
        ("1.0+local", "==1.0", True),
        ("0.0.480", "==0.0.48.*", False),
        ("7", "", True),
    ],
)
def test_versions_are_compared_by_numbers(found, wanted, fits):
    assert _versions._fits(found, wanted) == fits


# --- As a program


def run_as_program(*, environment, read=True):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    how = dict(env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, "-m", "ejkernel", "doctor"], **how)
    if not read:
        process.stdout.close()
        err = process.stderr.read()
        return process.wait(), "", err
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.mark.parametrize("platforms", ["no_such_platform", "rocm"])
def test_without_a_device_it_shows_what_there_is_and_fails(platforms):
    status, out, err = run_as_program(environment={"JAX_PLATFORMS": platforms})
    assert status == 1 and "Traceback" not in err
    assert jax.__version__ in out and f"cpu   none: JAX_PLATFORMS={platforms} leaves it out" in out
    assert out.splitlines()[-1].startswith(f"JAX has no device to run on: JAX_PLATFORMS={platforms}: ")


def test_a_reader_that_has_gone():
    status, _, err = run_as_program(environment={}, read=False)
    assert status == 128 + 13 and "Traceback" not in err and "Exception ignored" not in err


@pytest.mark.core
def test_its_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--help"])
    assert ended.value.code == 0 and "exit status" in capsys.readouterr().out
