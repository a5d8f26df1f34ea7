"""A JSON file of entries that many processes share.

A writer takes a lock, reads the current entries, writes a temporary file with its own added, and renames it: no reader
sees a partly written file, no writer loses entries of another, and a killed process loses at most the entries that it
was adding. Errors with a file of the library (damaged, of another program, unreadable, a pipe, a lock that is never
released, a full disk) cause a warning, never an exception or an endless wait; with a file that a user names they raise.
A damaged file is set aside, and one in the format of another version of the library is left as it is.
"""

import contextlib
import json
import os
import re
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

LOCK_TIMEOUT_S = 5.0
"""How long a writer waits for the lock of a file, which others hold while they write it."""
_LOCK_POLL_S = 2e-3
# The deepest nesting of arrays and objects; a config has a few. Python's own limit raises a RecursionError.
_DEEPEST = 50
# Digits of an integer; Python reads none of more than 4300.
_LONGEST = 100


def path_in(directory: str | os.PathLike, name: str) -> str:
    """The path of the file for `name`, which may have any characters, in a directory; `~` is expanded."""
    return os.path.join(os.path.expanduser(directory), re.sub(r"[^A-Za-z0-9._-]+", "_", name) + ".json")


def read_entries(path: str | os.PathLike, kind: str = "configs") -> dict[str, Any]:
    """The entries of a file, "configs" or "calls".

    Raises:
        OSError: it cannot be read, or is of another version of the library.
        ValueError: it is damaged, or another kind of file.
    """
    try:
        return _read(path, kind)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


class SharedFile:
    """A file, with the entries last read and those that could not be written in memory."""

    def __init__(self, path: str | os.PathLike, kind: str = "configs") -> None:
        self.path, self._kind = os.path.expanduser(path), kind
        self._entries: dict[str, Any] = {}
        self._unwritten: dict[str, Any] = {}
        self._version = None
        self._told: set[str] = set()
        self._lock_timeout = LOCK_TIMEOUT_S
        self._lock = threading.Lock()

    def read(self) -> dict[str, Any]:
        """The entries as they are now."""
        with self._lock:
            try:
                self._refresh()
            except OSError as error:
                self.warn(error, "the file cannot be read")
            except ValueError as error:
                self.warn(error, "the file is damaged and is ignored")
            return self._entries | self._unwritten if self._unwritten else self._entries

    def write(self, entries: dict[str, Any]) -> None:
        """Adds entries; if that fails they are kept in memory, and written with the next ones."""
        with self._lock:
            self._unwritten |= entries
            try:
                self._add(self._unwritten, self._set_aside)
                self._unwritten = {}
            except (OSError, ImportError) as error:
                self.warn(error, f"{self._kind} are kept in memory alone")

    def add(self, entries: dict[str, Any]) -> None:
        """Adds entries.

        Raises:
            OSError: the file cannot be written.
            ValueError: it is damaged, or another kind of file; it is left as it is.
        """
        try:
            with self._lock:
                self._add(entries)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def warn(self, cause: Exception | str, what: str = "") -> None:
        """Warns of the file once for each cause, whatever it prevents: `what` happens because of it."""
        if (why := str(cause)) not in self._told:
            self._told.add(why)
            message = f"{what}: {why}" if what else why
            warnings.warn(f"ejkernel: {self.path}: {message}", UserWarning, stacklevel=2)

    def _add(self, entries: dict[str, Any], set_aside: Callable[[ValueError], None] | None = None) -> None:
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        try:
            with locked(f"{self.path}.lock", self._lock_timeout):
                self._lock_timeout = LOCK_TIMEOUT_S
                self._version = None
                try:
                    self._refresh(self.warn if set_aside else _refuse)
                except ValueError as error:
                    if set_aside is None:
                        raise
                    set_aside(error)
                self._replace(self._entries | entries)
        except TimeoutError:
            self._lock_timeout = 0  # having waited once, do not wait again until the lock is free
            raise

    def _set_aside(self, error: ValueError) -> None:
        self.warn(error, "the file is damaged and was set aside")
        os.replace(self.path, f"{self.path}.damaged")

    def _refresh(self, complain: Callable[[str], None] | None = None) -> None:
        """Reads the file if it has changed since the last time; the previous entries stay if it is damaged."""
        try:
            if (version := _version(os.stat(self.path))) != self._version:
                self._version = version
                self._entries = _read(self.path, self._kind, complain or self.warn)
        except FileNotFoundError:
            self._entries, self._version = {}, None

    def _replace(self, entries: dict[str, Any]) -> None:
        # The lock is held, so no other process uses this name: a file left by a killed process is overwritten.
        temporary = f"{self.path}.new"
        with _opened(temporary, "w") as file:
            json.dump({"format": _format(self._kind), self._kind: entries}, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
            version = _version(os.fstat(file.fileno()))
        os.replace(temporary, self.path)
        self._entries, self._version = entries, version


def _version(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_mtime_ns, found.st_size


def _refuse(complaint: str) -> None:
    raise ValueError(complaint)


def _read(path: str | os.PathLike, kind: str, complain: Callable[[str], None] = _refuse) -> dict[str, Any]:
    """The entries; `complain` is called if a key occurs twice, of which the last counts, or an entry is skipped."""

    def unique(pairs):
        found = dict(pairs)
        if len(found) < len(pairs):
            complain("a key stands there twice, and the last one holds")
        return found

    with _opened(path, "r") as file:
        try:
            content = json.load(file, parse_int=_integer, object_pairs_hook=unique)
        except RecursionError:
            raise ValueError("brackets within brackets without end") from None
    found, wanted = content.get("format") if isinstance(content, dict) else None, _format(kind)
    if found != wanted and re.fullmatch(rf"ejkernel {kind} \d+", str(found)[:50]):
        raise OSError(f"its format is {found!r}, of another version of this library, which reads {wanted!r}")
    if found != wanted or not isinstance(content.get(kind), dict):
        raise ValueError(f"this is no file of {wanted!r}")
    entries = {key: entry for key, entry in content[kind].items() if _is_shallow(entry)}
    if len(entries) < len(content[kind]):
        complain(f"an entry of brackets within brackets, more than {_DEEPEST}, is left out")
    return entries


def _integer(digits: str) -> int | float:
    """An int, or a float if it is too long for one: no field accepts that, and other entries are still read."""
    return int(digits) if len(digits) <= _LONGEST else float(digits)


def _is_shallow(value: Any, levels: int = _DEEPEST) -> bool:
    if not isinstance(value, dict | list):
        return True
    inside = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_shallow(x, levels - 1) for x in inside)


@contextlib.contextmanager
def _opened(path: str | os.PathLike, mode: str) -> Iterator[Any]:
    """An opened regular file; raises an `OSError` for a pipe or a device, which might block for ever."""
    without_waiting = lambda path, flags: os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    with open(path, mode, encoding="utf-8", opener=without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{os.fspath(path)} is no regular file")
        yield file


def _format(kind: str) -> str:
    return f"ejkernel {kind} 1"


@contextlib.contextmanager
def locked(path: str, timeout: float, shared: bool = False) -> Iterator[None]:
    """Holds the lock of a file against other processes and threads; the system releases it when the process ends.

    A shared lock is held beside other shared ones, and excludes those that are not.

    Raises:
        TimeoutError: it was held by another for the whole timeout.
    """
    import fcntl  # POSIX only

    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with _opened(path, "a") as lock:
        until = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(lock, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise TimeoutError(f"another process holds {path} for more than {LOCK_TIMEOUT_S:g} s") from None
                time.sleep(_LOCK_POLL_S)
        yield
