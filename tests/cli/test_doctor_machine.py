"""The report of `ejkernel doctor` on a machine: its devices, installed packages and their versions."""

import glob
import os
import subprocess
import sys

import jax
import pytest

from ejkernel.__main__ import main
from ejkernel.cli import _versions, doctor
from ejkernel.cli._checks import PASSES, Check, Outcome
from ejkernel.types import Target
from tests.cli.doctor_checks import H200, needs_jax_triton

# --- What is wrong with a machine


def outcomes(**of_triton):
    """Outcomes of an operation with kernels in Triton, and in Mosaic GPU for its gradient only."""
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
    """Sets the installed packages: name → version and requirements."""

    def install(**packages):
        packages = {name.replace("_", "-"): of for name, of in packages.items()}
        monkeypatch.setattr(_versions, "version", lambda name: packages.get(name, (None,))[0])
        monkeypatch.setattr(_versions.metadata, "requires", lambda name: packages[name][1:])
        return [f"{package} {what}" for package, what in _versions.misfits(list(packages))]

    return install


def test_packages_declare_their_own_requirements(installed):
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


def test_unconditional_requirements_must_be_installed(installed):
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
def test_without_a_device_it_shows_the_versions_and_fails(platforms):
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
