"""`ejkernel calibrate`: measurements are kept, and it says so only if they are."""

import pytest

from ejkernel.__main__ import main
from ejkernel.callib import ceilings


@pytest.fixture
def small_sizes(monkeypatch):
    monkeypatch.setattr(ceilings, "_SIZES", {"gpu": (64, 8), "tpu": (64, 8), "cpu": (64, 8)})


def test_calibrate_says_that_it_kept(capsys, small_sizes):
    assert main(["calibrate"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("kept for cpu")


def test_calibrate_says_where_nothing_was_kept(capsys, small_sizes, monkeypatch, tmp_path):
    (file := tmp_path / "file").write_text("")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(file))
    with pytest.warns(UserWarning, match="cannot be"):
        assert main(["calibrate"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "not kept"
