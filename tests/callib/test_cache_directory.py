"""The directory of what is kept between processes."""

import os
import tempfile
from pathlib import Path

from ejkernel.callib._cache_directory import cache_directory


def test_the_variable_decides_then_the_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/one")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "~/kept")
    assert cache_directory() == "/home/one/kept"
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "")
    assert cache_directory() == "/home/one/.cache/ejkernel"


def test_a_user_without_a_home_has_a_directory_of_temporary_files(monkeypatch):
    """As in a container whose user is a number alone; `~` would be a folder of that name in the working directory."""
    monkeypatch.delenv("EJKERNEL_CACHE_DIR", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert Path(cache_directory()) == Path(tempfile.gettempdir()) / f"ejkernel-{os.getuid()}"
