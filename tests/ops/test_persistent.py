"""PersistentCache with many processes, processes killed while they write, and entries of classes of all kinds."""

import json
import os
import sys
from dataclasses import dataclass

import pytest
from shown import HEURISTIC, OTHER, TUNED, Config, Shown, executor, key_of, ones, ran

from ejkernel.errors import a_type
from ejkernel.ops import PersistentCache
from tests.ops.persisted import DEVICE, file_in, process, stored

# --- Many processes


def test_four_processes_lose_nothing(directory, quiet):
    write = "for i in range(50): cache.put(f'{n} {{i}}', Config(i), 'cpu|cpu')"
    processes = [process(directory, write.format(n=n)) for n in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    cache = PersistentCache(directory)
    assert all(cache.get(f"{n} {i}", DEVICE) == Config(i) for n in range(4) for i in range(50))


# Kills writers at random moments. What a writer has reported as written must be in the file.
KILLS = """
    written = {}
    for n in range(TIMES):
        reports, report = os.pipe()
        if (writer := os.fork()) == 0:
            for i in range(10**6):
                cache.put(f"{n} {i}", Config(i), "cpu|cpu")
                os.write(report, b"w")
        os.close(report)
        os.read(reports, 1)
        time.sleep(random.uniform(0, 0.02))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        written[n] = 1 + len(os.read(reports, 10**6))
        os.close(reports)
        found = PersistentCache(cache._path)
        for m, count in written.items():
            assert all(found.get(f"{m} {i}", "cpu|cpu") == Config(i) for i in range(count)), (n, m, count)
"""


def test_a_kill_loses_nothing_that_was_written(directory):
    assert process(directory, KILLS.replace("TIMES", "5")).wait() == 0


@pytest.mark.slow
def test_a_hundred_kills_lose_nothing_that_was_written(directory):
    assert process(directory, KILLS.replace("TIMES", "100")).wait() == 0


def test_writes_of_another_process_are_read(directory, quiet):
    here = PersistentCache(directory)
    here.put("ours", TUNED)
    assert process(directory, "cache.put('theirs', Config(7), 'cpu|cpu')").wait() == 0
    assert here.get("theirs") == OTHER and here.get("ours") == TUNED


def test_devices_have_files_of_their_own(directory):
    cache = PersistentCache(directory)
    cache.put("key", TUNED, "gpu|NVIDIA H200")
    cache.put("key", OTHER, "tpu|TPU v5 lite")
    assert {file.name for file in directory.glob("*.json")} == {"gpu_NVIDIA_H200.json", "tpu_TPU_v5_lite.json"}
    assert (cache.get("key", "gpu|NVIDIA H200"), cache.get("key"), len(os.listdir(directory))) == (TUNED, None, 4)


@pytest.mark.parametrize("path", [3, b"/tmp", ["/tmp"]], ids=lambda path: type(path).__name__)
def test_a_path_is_a_path(path):
    with pytest.raises(TypeError, match=f"PersistentCache: path is {a_type(path)}"):
        PersistentCache(path)


@pytest.mark.parametrize("name", ["os:system", "no_such_module:Config", "shown:Shown", "shown:no.such", "shown:", ""])
def test_an_entry_of_an_unknown_class_is_a_miss_and_is_kept(directory, quiet, name):
    stored(directory)
    content = json.loads(file_in(directory).read_text())
    content["configs"]["foreign"] = {"class": name, "config": {"command": "true"}}
    file_in(directory).write_text(json.dumps(content))
    cache = PersistentCache(directory)
    assert cache.get("foreign") is None and "no_such_module" not in sys.modules
    cache.put("new", OTHER)
    assert json.loads(file_in(directory).read_text())["configs"]["foreign"]["class"] == name


def test_an_entry_of_a_local_class_is_found_if_the_class_is_expected(directory, quiet):
    @dataclass(frozen=True)
    class Local:
        block: int = 0

    def lookalike():
        @dataclass(frozen=True)
        class Local:
            block: int = 0

        return Local

    PersistentCache(directory).put("key", Local(3))
    again = PersistentCache(directory)
    assert again.get("key", cls=Local) == Local(3)
    assert again.get("key", cls=lookalike()) is None


def test_an_entry_that_cannot_be_stored_causes_a_warning(directory):
    cache = PersistentCache(directory)
    with pytest.warns(UserWarning, match="has to be a dataclass"):
        cache.put("key", (1, 2))
    assert cache.get("key") is None


def test_each_cause_is_told_once(directory):
    """A second class that cannot be stored, after a first one, too."""

    @dataclass
    class Loose:
        block: int = 1

    @dataclass
    class Open:
        block: int = 1

    cache = PersistentCache(directory)
    with pytest.warns(UserWarning) as warned:
        for config in (Loose(1), Loose(2), Open(1), Open(1)):
            cache.put("key", config)
    told = [str(w.message).rpartition(", and ")[2] for w in warned]
    assert told == ["Loose is not frozen", "Open is not frozen"]


def test_a_stored_config_of_another_class_than_the_kernels_is_a_miss(directory):
    @dataclass(frozen=True)
    class Old:
        block: int = 9

    kernel = Shown()
    PersistentCache(directory).put(key_of(kernel, ones()), Old())
    assert ran(executor(persistent=PersistentCache(directory), autotune=False)(kernel, ones())) == HEURISTIC
    PersistentCache(directory).put(key_of(kernel, ones()), Config(5))
    assert ran(executor(persistent=PersistentCache(directory), autotune=False)(kernel, ones())) == Config(5)
