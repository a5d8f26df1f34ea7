"""The source, date and commit that an entry of PersistentCache was measured with, and which entries are used."""

import json
import re

import pytest
from shown import HEURISTIC, OTHER, TUNED, Config, Shown, executor, key_of, ones, ran

from ejkernel.ops import PersistentCache, Tuner
from ejkernel.ops.utils.provenance import commit_of
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
