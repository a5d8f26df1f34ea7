"""The source, date and commit that an entry of PersistentCache was measured with, and which entries are used."""

import json
import os
import re
import shutil
import subprocess

import pytest
from shown import HEURISTIC, OTHER, TUNED, Config, Shown, executor, key_of, ones, ran

from ejkernel.ops import PersistentCache, Tuner
from ejkernel.ops.utils.provenance import code_of, commit_of, version_of
from tests.ops.persisted import DEVICE, file_in


class Two(Shown):
    def config_space(self, inv):
        return [TUNED, OTHER]


def of_source(source: str, key: str) -> str:
    """The key of the same call with another source."""
    return re.sub(r"source [0-9a-f]+", f"source {source}", key)


@pytest.mark.parametrize("found, order", [(OTHER, [OTHER, TUNED]), (Config(99), [TUNED, OTHER])], ids=["known", "gone"])
def test_a_config_measured_with_another_source_is_tried_first(directory, found, order):
    """If it is still in the space."""
    measured, kernel, cache = [], Two(), PersistentCache(directory)
    cache.put(of_source("c0ffee", key_of(kernel, ones())), found)

    class Told(Tuner):
        def measure(self, kernel, inv, configs=None, budget=float("inf")):
            measured.append(list(configs))
            return super().measure(kernel, inv, configs, budget)

    assert ran(executor(persistent=cache, autotune=True, tuner=Told(1, 1))(kernel, ones())) in order
    assert measured == [order]


def test_without_measuring_it_does_not_serve(directory):
    kernel, cache = Two(), PersistentCache(directory)
    cache.put(of_source("c0ffee", key_of(kernel, ones())), OTHER)
    assert ran(executor(persistent=cache, autotune=False)(kernel, ones())) == HEURISTIC


def test_of_several_the_last_measured_is_used(directory):
    kernel, cache = Two(), PersistentCache(directory)
    key = key_of(kernel, ones())
    dates = {"1": "2026-01-02", "2": "2026-03-01", "3": "2025-12-31"}
    for source in dates:
        cache.put(of_source(source, key), Config(int(source)))
    content = json.loads(file_in(directory).read_text())
    for source, date in dates.items():
        content["configs"][of_source(source, key)]["measured"]["date"] = date
    file_in(directory).write_text(json.dumps(content))
    assert PersistentCache(directory).outdated(key) == Config(2)
    assert cache.outdated(key_of(kernel, ones(2, 2))) is None


def test_an_entry_says_when_and_with_what_it_was_measured(directory):
    PersistentCache(directory).put("key", TUNED, DEVICE)
    (entry,) = json.loads(file_in(directory).read_text())["configs"].values()
    assert entry["measured"].keys() >= {"date", "version"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["measured"]["date"])


@pytest.mark.parametrize(
    "files",
    [
        {"HEAD": "ref: refs/heads/main\n", "refs/heads/main": "c0ffee\n"},
        {
            "HEAD": "ref: refs/heads/main\n",
            "packed-refs": "# sorted\nbad refs/heads/dev\nc0ffee refs/heads/main\n",
        },
        {"HEAD": "c0ffee\n"},
    ],
    ids=["loose", "packed", "detached"],
)
def test_the_commit_of_a_checkout(tmp_path, files):
    for name, text in files.items():
        (tmp_path / ".git" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".git" / name).write_text(text)
    assert commit_of(tmp_path) == "c0ffee"
    assert commit_of(tmp_path / "elsewhere") is None
    assert code_of(tmp_path) == "c0ffee or with changes", "git knows no such checkout"


def edit(checkout):
    (checkout / "ejkernel/kernel.py").write_text("block = 2")


def add(checkout):
    (checkout / "lowering").mkdir()
    (checkout / "lowering/rule.py").write_text("")


def note(checkout):
    (checkout / "notes.txt").write_text("not of the library")


@pytest.mark.parametrize(
    "change, mark",
    [(lambda checkout: None, ""), (edit, " with changes"), (add, " with changes"), (note, "")],
    ids=["as committed", "edited", "added", "elsewhere"],
)
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_commit_with_changes_is_not_that_commit(tmp_path, change, mark):
    own = {name: x for name, x in os.environ.items() if not name.startswith("GIT_")} | {"GIT_CONFIG_GLOBAL": os.devnull}
    author = ("-c", "user.name=A", "-c", "user.email=a@b")
    git = lambda *command: subprocess.run(
        ["git", *author, *command], cwd=tmp_path, env=own, check=True, capture_output=True
    )
    (tmp_path / "ejkernel").mkdir()
    (tmp_path / "ejkernel/kernel.py").write_text("block = 1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    change(tmp_path)
    assert code_of(tmp_path) == commit_of(tmp_path) + mark


def test_the_version_of_a_checkout(tmp_path):
    """It need not be installed, and what is installed may be another one."""
    installed = version_of(tmp_path)
    for name, version in (("ejkernel", "7.0"), ("another", installed)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "7.0"\n')
        assert version_of(tmp_path / name) == version
