"""PersistentCache: configs on disk, one JSON file for each kind of device, shared by many processes.

A file is only ever replaced whole (written beside it, then renamed), and a writer first takes in what others have
written, under a lock: no reader sees half a file, no writer loses another's entry, and a process that is killed loses
at most what it was about to add. Trouble with a file (damaged, foreign, unreadable, full disk) costs a warning, never
an exception.
"""

import contextlib
import json
import os
import re
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from ..utils.devices import device_fingerprint
from ..utils.serialization import pack, unpack

_FORMAT = "ejkernel configs 1"


class PersistentCache:
    """Configs on disk by key, with the interface of `ConfigCache`.

    Configs are stored with the name of their class, which has to be a frozen dataclass. A reader that expects a class,
    or has it loaded, gets the config back; code is never loaded for the sake of a file.

    Args:
        path: the directory; `~` is expanded. None: `$EJKERNEL_CACHE_DIR`, else `~/.cache/ejkernel`, as it is when used.
    """

    def __init__(self, path: str | os.PathLike | None = None):
        self._path = path
        self._files: dict[tuple[str, str], _File] = {}

    def get(self, key: str, device: str | None = None, cls: type | None = None) -> Any | None:
        """The config of `key` for `device` (a `device_fingerprint`; by default that in use), None if there is none.

        `cls` is the class that the config has to be of, where the caller knows it.
        """
        file = self._file(device)
        packed = file.read().get(key)
        if packed is None:
            return None
        try:
            return unpack(packed, cls)
        except ValueError as error:
            file.warn(f"an entry was ignored: {error}")
            return None

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def put(self, key: str, config: Any, device: str | None = None) -> None:
        """Stores the config of `key` for `device` (by default that in use)."""
        file = self._file(device)
        try:
            file.write({key: pack(config)})
        except TypeError as error:
            file.warn(str(error))

    def _file(self, device: str | None) -> "_File":
        directory = self._path or os.environ.get("EJKERNEL_CACHE_DIR") or "~/.cache/ejkernel"
        which = (directory, device or device_fingerprint())
        return self._files.get(which) or self._files.setdefault(which, _File(*which))


class _File:
    """One file, and what of it is in memory: what was last read, and what could not be written."""

    def __init__(self, directory: str | os.PathLike, device: str):
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", device)
        self.path = os.path.join(os.path.expanduser(directory), f"{name}.json")
        self._entries: dict[str, Any] = {}
        self._unwritten: dict[str, Any] = {}
        self._version = None
        self._warned = False
        self._lock = threading.Lock()

    def read(self) -> dict[str, Any]:
        with self._lock:
            try:
                self._refresh()
            except OSError as error:
                self.warn(f"the file cannot be read: {error}")
            except ValueError as error:
                self.warn(f"the file is damaged and was ignored: {error}")
            return self._entries | self._unwritten if self._unwritten else self._entries

    def write(self, entries: dict[str, Any]) -> None:
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
