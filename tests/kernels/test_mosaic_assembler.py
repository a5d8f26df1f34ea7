"""Kernels of Mosaic GPU are passed over where JAX assembles them with nvJitLink, as its CUDA plugin does since 0.12."""

from types import SimpleNamespace

import pytest

import ejkernel
from ejkernel.kernels._pallas.gpu import _assembler
from ejkernel.modules._operation import OPERATIONS
from ejkernel.types import Target

from . import mosaic_compiler

HOPPER = Target("cuda", "NVIDIA H200")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that makes this process see a plugin of a version, beside the libraries that are named."""

    def made(cuda, version, installed=(), of_system=()):
        for name in installed:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        plugin = SimpleNamespace(version=version, locate_file=tmp_path.joinpath)
        monkeypatch.setattr(_assembler, "_plugin", lambda of: plugin if version and of == cuda else None)
        monkeypatch.setattr(_assembler, "_loads", lambda library: library in of_system)

    _assembler.serializes.cache_clear()
    yield made
    _assembler.serializes.cache_clear()


OF_13, OF_12 = "nvidia/cu13/lib/libnvJitLink.so.13", "nvidia/nvjitlink/lib/libnvJitLink.so.12"


@pytest.mark.parametrize("version", ["0.12.0", "0.12.0.1", "0.13.0", "1.0"])
@pytest.mark.parametrize(
    "cuda, found",
    [
        (13, dict(installed=[OF_13])),
        (12, dict(installed=[OF_12])),
        (13, dict(of_system=["libnvJitLink.so.13"])),
        (12, dict(of_system=["libnvJitLink.so.12"])),
    ],
    ids=["13", "12", "13-of-the-system", "12-of-the-system"],
)
def test_a_plugin_that_finds_the_library_assembles_with_it(cuda, found, version, machine):
    machine(cuda, version, **found)
    assert f"jax {version} assembles with nvJitLink" in _assembler.serializes()


@pytest.mark.parametrize(
    "version, found",
    [
        ("0.11.2", [OF_13]),
        ("0.10.2", [OF_13]),
        ("0.12.0.1", []),
        ("0.12.0.1", [OF_12]),
        (None, [OF_13]),
    ],
)
def test_an_older_plugin_one_without_the_library_and_none_do_not(version, found, machine):
    machine(13, version, installed=found)
    assert _assembler.serializes() is None


@pytest.mark.parametrize(
    "operation", ["flash_attention", "flash_mla", "multi_latent_page_attention", "ragged_page_attention"]
)
def test_its_kernels_are_passed_over_and_the_reason_is_shown(operation, machine):
    machine(13, "0.12.0.1", installed=[OF_13])
    example = OPERATIONS[operation].example()
    shown = str(ejkernel.explain(operation, **example, target=HOPPER))
    assert "assembles with nvJitLink" in shown and "jax below 0.12" in shown


def test_the_plugin_here_assembles_as_is_said_of_it(tmp_path):
    """By the remarks of ptxas; where JAX has mended it, this test says so."""
    if reason := mosaic_compiler.missing():
        pytest.skip(reason)
    reports = mosaic_compiler.reports(tmp_path, "flash_attention", "phi2", "anyway")
    assert reports and any(remarks for report in reports.values() for _, remarks in report) == bool(
        _assembler.serializes()
    )
