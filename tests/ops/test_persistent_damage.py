"""PersistentCache where its file is damaged, foreign, not a file, locked or unwritable."""

import json
import os
import subprocess
import sys
import time
import warnings

import pytest
from shown import OTHER, TUNED, Shown, executor, ones, ran

from ejkernel.ops import PersistentCache, load_table
from ejkernel.ops.utils import shared_file
from tests.ops.persisted import DEVICE, file_in, stored

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


def test_a_file_of_another_version_is_left_as_it_is(directory):
    """Two versions of the library share a directory: neither takes the file of the other for damaged."""
    stored(directory)
    file = file_in(directory)
    file.write_text(theirs := file.read_text().replace("ejkernel configs 1", "ejkernel configs 2"))
    cache = PersistentCache(directory)
    with pytest.warns(UserWarning, match="its format is 'ejkernel configs 2', of another version of this library"):
        assert cache.get("key") is None
        cache.put("new", OTHER)
    assert cache.get("new") == OTHER and file.read_text() == theirs
    assert not file.with_name(file.name + ".damaged").exists()


@pytest.mark.parametrize(
    "entry", [None, 3, [], {"class": 3, "config": {}}, {"class": "shown:Config", "config": {"no_such_field": 1}}]
)
def test_a_damaged_entry_does_not_affect_others(directory, entry):
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
def test_a_huge_entry_does_not_affect_others(directory, entry):
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


def test_of_a_duplicate_key_the_last_entry_is_used(directory):
    PersistentCache(directory).put("key", OTHER)
    text = file_in(directory).read_text().replace('"configs": {', f'"configs": {{"key": {json.dumps(FIELDS)},')
    file_in(directory).write_text(text)
    with pytest.warns(UserWarning, match="a key stands there twice, and the last one holds"):
        assert PersistentCache(directory).get("key") == OTHER
    with pytest.raises(ValueError, match="a key stands there twice"):
        load_table(file_in(directory))


def test_entries_read_before_the_damage_are_written_again(directory):
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
def test_a_path_that_is_no_file_is_left_as_it_is_without_waiting(directory, put, suffix):
    """In the place of the file itself, and of the files made beside it."""
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


@pytest.mark.parametrize("path", ["/proc/no/such/place", __file__])
def test_without_write_access_configs_stay_in_memory(path):
    cache = PersistentCache(path)
    with pytest.warns(UserWarning) as warned:
        cache.put("key", TUNED)
        cache.put("other key", OTHER)
    assert len(warned) == 1
    assert (cache.get("key"), cache.get("other key"), PersistentCache(path)._path) == (TUNED, OTHER, path)


def test_a_full_disk_causes_a_warning_and_loses_no_entry(directory, monkeypatch):
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


def test_a_kernel_runs_without_access_to_the_disk():
    with pytest.warns(UserWarning):
        run = executor(persistent=PersistentCache("/proc/no/such/place"), autotune=True)
        kernel = Shown()
        assert ran(run(kernel, ones())) == ran(run(kernel, ones())) == TUNED
