"""A JSON file of entries that many processes share.

It is only ever replaced whole (written beside, then renamed), and a writer first takes in what others have written,
under a lock: no reader sees half a file, no writer loses another's entry, and a process that is killed loses at most
what it was about to add. Trouble with a file (damaged, foreign, unreadable, full disk) costs a warning, never an
exception.
"""

import contextlib
import json
import os
import re
import threading
import warnings
from collections.abc import Iterator
from typing import Any

_FORMAT = "ejkernel configs 1"


def cache_directory() -> str:
    """`$EJKERNEL_CACHE_DIR`, else `~/.cache/ejkernel`, as it is now."""
    return os.environ.get("EJKERNEL_CACHE_DIR") or "~/.cache/ejkernel"


class SharedFile:
    """One file, and what of it is in memory: what was last read, and what could not be written."""

    def __init__(self, directory: str | os.PathLike, name: str):
        file = re.sub(r"[^A-Za-z0-9._-]+", "_", name) + ".json"
        self.path = os.path.join(os.path.expanduser(directory), file)
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
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
                with _locked(f"{self.path}.lock"):
                    self._take_in_what_others_wrote()
                    self._replace(self._entries | self._unwritten)
                    self._unwritten = {}
            except (OSError, ImportError) as error:
                self.warn(f"configs are kept in memory alone: {error}")

    def warn(self, message: str) -> None:
        """Warns of the file, once."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"ejkernel: {self.path}: {message}", UserWarning, stacklevel=2)

    def _take_in_what_others_wrote(self) -> None:
        self._version = None
        try:
            self._refresh()
        except ValueError as error:
            self.warn(f"the file is damaged and was set aside: {error}")
            os.replace(self.path, f"{self.path}.damaged")

    def _refresh(self) -> None:
        """Reads the file unless it is the one that was read last."""
        try:
            if (version := _version(os.stat(self.path))) != self._version:
                self._entries, self._version = {}, version
                with open(self.path, encoding="utf-8") as file:
                    self._entries = _entries(json.load(file))
        except FileNotFoundError:
            self._entries, self._version = {}, None

    def _replace(self, entries: dict[str, Any]) -> None:
        # The lock is held, so the name is free: what a killed process left there is overwritten.
        temporary = f"{self.path}.new"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "configs": entries}, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
            version = _version(os.fstat(file.fileno()))
        os.replace(temporary, self.path)
        self._entries, self._version = entries, version


def _version(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_mtime_ns, found.st_size


def _entries(content: Any) -> dict[str, Any]:
    if (
        not isinstance(content, dict)
        or content.get("format") != _FORMAT
        or not isinstance(content.get("configs"), dict)
    ):
        raise ValueError(f"this is no file of {_FORMAT!r}")
    return content["configs"]


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Holds the lock of a file against other processes and other caches; the system frees it when its holder dies."""
    import fcntl  # which only POSIX has

    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
