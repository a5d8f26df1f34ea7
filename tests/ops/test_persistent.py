"""PersistentCache: many processes, kills in the midst of a write, and files that are not what they should be."""

import json
import os
import re
import subprocess
import sys
import textwrap
import time
import warnings
from dataclasses import dataclass

import pytest
import shown
from shown import HEURISTIC, OTHER, TUNED, Config, Shown, executor, key_of, ones, ran

from ejkernel.ops import PersistentCache, Tuner, load_table
from ejkernel.ops.utils import shared_file
from ejkernel.ops.utils.provenance import commit_of

DEVICE = "cpu|cpu"


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "configs"


@pytest.fixture
def quiet():
    """No warning is allowed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def file_in(directory):
    (file,) = directory.glob("*.json")
    return file


def process(directory, script):
    """Another process, with `cache` over the directory. The device is always given, so that it starts no backend."""
    prelude = f"""
        import os, random, signal, sys, time, warnings
        sys.path.insert(0, {os.path.dirname(shown.__file__)!r})
        from shown import Config
        from ejkernel.ops import PersistentCache
        warnings.simplefilter("error", UserWarning)
        cache = PersistentCache({str(directory)!r})
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script)])


# --- Many processes


def test_four_processes_lose_nothing(directory, quiet):
    write = "for i in range(50): cache.put(f'{n} {{i}}', Config(i), 'cpu|cpu')"
    processes = [process(directory, write.format(n=n)) for n in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    cache = PersistentCache(directory)
    assert all(cache.get(f"{n} {i}", DEVICE) == Config(i) for n in range(4) for i in range(50))


# Kills writers at random moments. What a writer has reported as written has to be there, and so has all from before.
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


def test_what_another_process_writes_is_seen(directory, quiet):
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


# --- Files that are not what they should be


def stored(directory):
    """A cache with one entry, reopened."""
    PersistentCache(directory).put("key", TUNED)
    return PersistentCache(directory)


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", '{"format": "another"}', '{"configs": {}}', "\x00\x01", "é".encode("latin1"),
        DEEP, DEEP + "]" * 200_000, '{"a":' * 200_000, f'{{"format": "ejkernel configs 1", "configs": {{"key": {DEEP}',
    ],
    ids=lambda content: f"{content[:12]!r}",
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_ignored_set_aside_and_rebuilt(directory, content):
    stored(directory)
    file = file_in(directory)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    cache = PersistentCache(directory)
    with pytest.warns(UserWarning, match="damaged") as warned:
        assert cache.get("key") is None and cache.get("key") is None
        cache.put("new", OTHER)
    assert len(warned) == 1
    assert PersistentCache(directory).get("new") == OTHER
    assert file.with_name(file.name + ".damaged").exists()


@pytest.mark.parametrize(
    "entry", [None, 3, [], {"class": 3, "config": {}}, {"class": "shown:Config", "config": {"no_such_field": 1}}]
)
def test_a_damaged_entry_costs_no_other(directory, entry):
    stored(directory)
    content = json.loads(file_in(directory).read_text())
    content["configs"]["damaged"] = entry
    file_in(directory).write_text(json.dumps(content))
    cache = PersistentCache(directory)
    with warnings.catch_warnings(record=True):
        assert cache.get("damaged") is None
    assert cache.get("key") == TUNED
    cache.put("new", OTHER)
    assert json.loads(file_in(directory).read_text())["configs"].keys() == {"key", "new", "damaged"}


FIELDS = {"class": "shown:Config", "config": {"block": 1}}


@pytest.mark.parametrize(
    "entry",
    [
        json.dumps(FIELDS).replace("1", "9" * 10_000),
        json.dumps(FIELDS).replace("1", "1e999"),
        json.dumps(FIELDS).replace("1", "NaN"),
        json.dumps(FIELDS).replace("1", '{"$dtype": "(2,"}'),
        json.dumps(FIELDS).replace("1", '{"$dtype": []}'),
        json.dumps(FIELDS).replace("1", "[" * 500 + "]" * 500),
    ],
    ids=["digits", "infinite", "nan", "record", "no_dtype", "deep"],
)
def test_an_entry_beyond_measure_costs_no_other(directory, entry):
    stored(directory)
    text = file_in(directory).read_text().replace('"configs": {', f'"configs": {{"damaged": {entry},')
    file_in(directory).write_text(text)
    cache = PersistentCache(directory)
    with pytest.warns(UserWarning):
        assert cache.get("damaged") is None and cache.get("key") == TUNED
    cache.put("new", OTHER)
    again = PersistentCache(directory)
    with warnings.catch_warnings(record=True):
        assert (again.get("key"), again.get("new"), again.get("damaged")) == (TUNED, OTHER, None)


def test_of_a_key_that_stands_there_twice_the_last_holds(directory):
    PersistentCache(directory).put("key", OTHER)
    text = file_in(directory).read_text().replace('"configs": {', f'"configs": {{"key": {json.dumps(FIELDS)},')
    file_in(directory).write_text(text)
    with pytest.warns(UserWarning, match="a key stands there twice, and the last one holds"):
        assert PersistentCache(directory).get("key") == OTHER
    with pytest.raises(ValueError, match="a key stands there twice"):
        load_table(file_in(directory))


def test_what_was_read_before_the_damage_is_written_again(directory):
    cache = stored(directory)
    assert cache.get("key") == TUNED
    file_in(directory).write_text("[[[")
    with pytest.warns(UserWarning, match="damaged"):
        assert cache.get("key") == TUNED
    cache.put("new", OTHER)
    again = PersistentCache(directory)
    assert (again.get("key"), again.get("new")) == (TUNED, OTHER)


def pipe(path):
    os.mkfifo(path)


def pipe_with_a_writer(path):
    os.mkfifo(path)
    os.open(path, os.O_RDWR)  # open until the process ends: nobody who reads it comes to an end


def endless(path):
    path.symlink_to("/dev/zero")


def loop(path):
    path.symlink_to(path)


@pytest.mark.parametrize("suffix", ["", ".lock", ".new", ".damaged"])
@pytest.mark.parametrize("put", [pipe, pipe_with_a_writer, endless, loop, os.mkdir], ids=lambda put: put.__name__)
def test_what_is_no_file_is_left_where_it_is_and_nobody_waits(directory, put, suffix):
    """In the place of the file itself, and of those that are made beside it."""
    directory.mkdir()
    path = directory / f"cpu_cpu.json{suffix}"
    put(path)
    if suffix == ".damaged":
        (directory / "cpu_cpu.json").write_text("{")
    before, cache = os.lstat(path), PersistentCache(directory)
    started = time.monotonic()
    with pytest.warns(UserWarning) as warned:
        cache.put("key", TUNED)
        assert cache.get("key") == TUNED and PersistentCache(directory).get("other") is None
    assert time.monotonic() - started < 3
    assert (warned and os.lstat(path).st_ino == before.st_ino) or suffix == ".damaged"


def test_a_lock_that_is_never_given_up_is_waited_for_once(directory, monkeypatch):
    monkeypatch.setattr(shared_file, "LOCK_TIMEOUT_S", 0.5)
    held = stored(directory).path_of(DEVICE) + ".lock"
    hold = f"import fcntl, time; f = open({held!r}); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        cache = PersistentCache(directory)
        started = time.monotonic()
        with pytest.warns(UserWarning, match="another process holds .*lock for more than 0.5 s") as warned:
            cache.put("first", OTHER)
        waited = time.monotonic() - started
        cache.put("second", OTHER)
        again = time.monotonic() - started - waited
        assert len(warned) == 1 and 0.5 <= waited < 5 and again < 0.4
        assert [cache.get(key) for key in ("key", "first", "second")] == [TUNED, OTHER, OTHER]
        assert PersistentCache(directory).get("first") is None
    finally:
        process.kill()
        process.wait()
    cache.put("third", OTHER)
    found = PersistentCache(directory)
    assert [found.get(key) for key in ("key", "first", "second", "third")] == [TUNED, OTHER, OTHER, OTHER]


@pytest.mark.parametrize("path", [3, b"/tmp", ["/tmp"]], ids=lambda path: type(path).__name__)
def test_a_path_is_a_path(path):
    with pytest.raises(TypeError, match=f"PersistentCache: path is a {type(path).__name__}"):
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


def test_a_class_that_is_local_is_found_by_whoever_expects_it(directory, quiet):
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


@pytest.mark.parametrize("path", ["/proc/no/such/place", __file__])
def test_where_nothing_can_be_written_configs_stay_in_memory(path):
    cache = PersistentCache(path)
    with pytest.warns(UserWarning) as warned:
        cache.put("key", TUNED)
        cache.put("other key", OTHER)
    assert len(warned) == 1
    assert (cache.get("key"), cache.get("other key"), PersistentCache(path)._path) == (TUNED, OTHER, path)


def test_a_full_disk_costs_a_warning_and_no_entry(directory, monkeypatch):
    cache = stored(directory)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="No space left") as warned:
        patched.setattr(os, "fsync", full)
        cache.put("first", OTHER)
        cache.put("second", OTHER)
    assert len(warned) == 1 and cache.get("first") == cache.get("second") == OTHER and cache.get("key") == TUNED
    assert PersistentCache(directory).get("first") is None and PersistentCache(directory).get("key") == TUNED
    cache.put("third", OTHER)
    again = PersistentCache(directory)
    assert [again.get(key) for key in ("key", "first", "second", "third")] == [TUNED, OTHER, OTHER, OTHER]


def test_an_unreadable_file_is_never_replaced(directory, monkeypatch):
    cache = stored(directory)
    before = file_in(directory).read_text()

    def unreadable(path, mode="r", **how):
        if str(path).endswith(".json"):
            raise PermissionError(13, "Permission denied")
        return open(path, mode, **how)

    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="Permission denied"):
        patched.setattr("ejkernel.ops.utils.shared_file.open", unreadable, raising=False)
        cache.put("new", OTHER)
        assert cache.get("new") == OTHER
    assert file_in(directory).read_text() == before


def test_what_cannot_be_stored_costs_a_warning(directory):
    cache = PersistentCache(directory)
    with pytest.warns(UserWarning, match="has to be a dataclass"):
        cache.put("key", (1, 2))
    assert cache.get("key") is None


def test_a_kernel_runs_where_nothing_can_be_read_or_written():
    with pytest.warns(UserWarning):
        run = executor(persistent=PersistentCache("/proc/no/such/place"), autotune=True)
        kernel = Shown()
        assert ran(run(kernel, ones())) == ran(run(kernel, ones())) == TUNED


def test_a_stored_config_of_another_class_than_the_kernels_is_a_miss(directory):
    @dataclass(frozen=True)
    class Old:
        block: int = 9

    kernel = Shown()
    PersistentCache(directory).put(key_of(kernel, ones()), Old())
    assert ran(executor(persistent=PersistentCache(directory), autotune=False)(kernel, ones())) == HEURISTIC
    PersistentCache(directory).put(key_of(kernel, ones()), Config(5))
    assert ran(executor(persistent=PersistentCache(directory), autotune=False)(kernel, ones())) == Config(5)


# --- Where an entry comes from


class Two(Shown):
    def config_space(self, inv):
        return [TUNED, OTHER]


def of_source(source: str, key: str) -> str:
    """The key of the same call when the source was another one."""
    return re.sub(r"source [0-9a-f]+", f"source {source}", key)


@pytest.mark.parametrize("found, order", [(OTHER, [OTHER, TUNED]), (Config(99), [TUNED, OTHER])], ids=["known", "gone"])
def test_what_another_source_measured_is_tried_first(directory, found, order):
    """If it is still one of the space."""
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


def test_of_several_the_one_that_was_measured_last(directory):
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
