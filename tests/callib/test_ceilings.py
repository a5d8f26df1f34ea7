"""Ceilings are measured, stored and read again; a damaged file causes a warning."""

import pytest

from ejkernel import callib
from ejkernel.callib import ceilings as module


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(module._SIZES, "cpu", (2**16, 64))
    return tmp_path


def test_measurements_are_stored(small):
    lines = []
    found = callib.calibrate(tell=lines.append)
    assert found.copy > 0 and all(rate > 0 for rate in found.matmul.values()) and len(lines) == 1 + len(found.matmul)
    assert callib.known_ceilings(found.device_kind) == found
    assert callib.known_ceilings("another device") is None


def test_the_roofline_is_the_greater_of_the_two():
    ceilings = callib.Ceilings("device", copy=10.0, matmul={"float32": 100.0, "bfloat16": 200.0}, jax="")
    assert ceilings.seconds(1000, 10, "bfloat16") == 5
    assert ceilings.seconds(1000, 10, "float64") == 10
    assert ceilings.seconds(1000, 1000, "float32") == 100


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"copy": 1}'])
def test_a_damaged_file_causes_a_warning(small, text):
    found = callib.calibrate()
    (file,) = small.rglob("*.json")
    file.write_text(text)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert callib.known_ceilings(found.device_kind) is None


def test_an_unwritable_directory_causes_a_warning(small, monkeypatch):
    (small / "file").write_text("")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(small / "file"))
    with pytest.warns(UserWarning, match="cannot be kept"):
        callib.calibrate()
