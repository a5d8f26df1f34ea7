"""A JSON file of entries that many processes share.

It is only ever replaced whole (written beside, then renamed), and a writer first takes in what others have written,
under a lock: no reader sees half a file, no writer loses another's entry, and a process that is killed loses at most
what it was about to add. Trouble with a file of the library's own (damaged, foreign, unreadable, full disk) costs a
warning, never an exception; with one that a user names it is an error.
"""

import contextlib
import json
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any


def cache_directory() -> str:
    """`$EJKERNEL_CACHE_DIR`, else `~/.cache/ejkernel`, as it is now."""
    return os.environ.get("EJKERNEL_CACHE_DIR") or "~/.cache/ejkernel"


def path_in(directory: str | os.PathLike, name: str) -> str:
    """The path of the file called `name`, which may hold any characters, in a directory; `~` is expanded."""
    return os.path.join(os.path.expanduser(directory), re.sub(r"[^A-Za-z0-9._-]+", "_", name) + ".json")


def read_entries(path: str | os.PathLike, kind: str = "configs") -> dict[str, Any]:
    """The entries of a file, "configs" or "calls".

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or another kind of file.
    """
    try:
        return _read(path, kind)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


class SharedFile:
    """One file, and what of it is in memory: what was last read, and what could not be written."""

    def __init__(self, path: str | os.PathLike, kind: str = "configs"):
        self.path, self._kind = os.path.expanduser(path), kind
        self._entries: dict[str, Any] = {}
        self._unwritten: dict[str, Any] = {}
        self._version = None
        self._warned = False
        self._lock = threading.Lock()

    def read(self) -> dict[str, Any]:
        """The entries as they are now."""
        with self._lock:
            try:
                self._refresh()
            except OSError as error:
                self.warn(f"the file cannot be read: {error}")
            except ValueError as error:
                self.warn(f"the file is damaged and was ignored: {error}")
            return self._entries | self._unwritten if self._unwritten else self._entries

    def write(self, entries: dict[str, Any]) -> None:
        """Adds entries; where that fails they are kept in memory, and written with the next ones."""
        with self._lock:
            self._unwritten |= entries
            try:
                self._add(self._unwritten, self._set_aside)
                self._unwritten = {}
            except (OSError, ImportError) as error:
                self.warn(f"{self._kind} are kept in memory alone: {error}")

    def add(self, entries: dict[str, Any]) -> None:
        """Adds entries.

        Raises:
            OSError: the file cannot be written.
            ValueError: it is there and damaged, or another kind of file; it is left as it is.
        """
        try:
            with self._lock:
                self._add(entries)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def warn(self, message: str) -> None:
        """Warns of the file, once."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"ejkernel: {self.path}: {message}", UserWarning, stacklevel=2)

    def _add(self, entries: dict[str, Any], set_aside: Callable[[ValueError], None] | None = None) -> None:
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        with _locked(f"{self.path}.lock"):
            self._version = None
            try:
                self._refresh()
            except ValueError as error:
                if set_aside is None:
                    raise
                set_aside(error)
            self._replace(self._entries | entries)

    def _set_aside(self, error: ValueError) -> None:
        self.warn(f"the file is damaged and was set aside: {error}")
        os.replace(self.path, f"{self.path}.damaged")

    def _refresh(self) -> None:
        """Reads the file unless it is the one that was read last."""
        try:
            if (version := _version(os.stat(self.path))) != self._version:
                self._entries, self._version = {}, version
                self._entries = _read(self.path, self._kind)
        except FileNotFoundError:
            self._entries, self._version = {}, None

    def _replace(self, entries: dict[str, Any]) -> None:
        # The lock is held, so the name is free: what a killed process left there is overwritten.
        temporary = f"{self.path}.new"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"format": _format(self._kind), self._kind: entries}, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
            version = _version(os.fstat(file.fileno()))
        os.replace(temporary, self.path)
        self._entries, self._version = entries, version


def _version(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: str | os.PathLike, kind: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    is_of_kind = isinstance(content, dict) and content.get("format") == _format(kind)
    if not is_of_kind or not isinstance(content.get(kind), dict):
        raise ValueError(f"this is no file of {_format(kind)!r}")
    return content[kind]


def _format(kind: str) -> str:
    return f"ejkernel {kind} 1"


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Holds the lock of a file against other processes and other caches; the system frees it when its holder dies."""
    import fcntl  # which only POSIX has

    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
