"""PersistentCache: configs on disk, one JSON file for each kind of device, shared by many processes."""

import os
from typing import Any

from ...callib._cache_directory import cache_directory
from ...errors import a_type
from ..utils.devices import device_fingerprint
from ..utils.fingerprints import call_of
from ..utils.provenance import provenance
from ..utils.serialization import pack, unpack
from ..utils.shared_file import SharedFile, path_in


class PersistentCache:
    """Configs on disk by key, with the interface of `ConfigCache`.

    Configs are stored with the name of their class, which must be a frozen dataclass. A reader gets the config if it
    expects that class or has imported it; a file never causes code to be imported.

    Args:
        path: the directory; `~` is expanded. None: `$EJKERNEL_CACHE_DIR`, else `~/.cache/ejkernel`, as it is when used.
    """

    def __init__(self, path: str | os.PathLike | None = None) -> None:
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeError(f"PersistentCache: path is {a_type(path)}; it must be a directory's path or None")
        self._path = path
        self._files: dict[str, SharedFile] = {}

    def get(self, key: str, device: str | None = None, cls: type | None = None) -> Any | None:
        """The config of `key` for `device` (a `device_fingerprint`, by default of the device in use), None if missing.

        `cls` is the class that the config must have, if the caller knows it.
        """
        file = self._file(device)
        return _unpacked(file, file.read().get(key), cls)

    def outdated(self, key: str, device: str | None = None, cls: type | None = None) -> Any | None:
        """The config last measured for this call with another source or other versions, or None.

        It is a good first candidate for measuring, and never used unmeasured.
        """
        file, call = self._file(device), call_of(key)
        entries = [entry for other, entry in file.read().items() if other != key and call_of(other) == call]
        return _unpacked(file, max(entries, key=_date, default=None), cls)

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def put(self, key: str, config: Any, device: str | None = None, tried: tuple[int, int] | None = None) -> None:
        """Stores the config of `key` for `device` (by default the one in use).

        `tried` is given if only some configs were measured: (number measured, number of all). It is stored beside the
        config, as `"tried": [3, 12]`.

        Raises:
            TypeError: the key is not a str.
        """
        if not isinstance(key, str):
            raise TypeError(f"PersistentCache.put: key is {a_type(key)}; it must be a str, as key_builder makes")
        file = self._file(device)
        try:
            file.write({key: entry_of(config, tried)})
        except TypeError as error:
            file.warn(error, "a config is not stored")

    def budget_spent(self, key: str, device: str | None = None) -> float:
        """The largest budget in seconds of a search for `key` that ended before two configs could be compared; or 0."""
        entry = self._file(device, "searches").read().get(key)
        seconds = entry.get("budget_spent") if isinstance(entry, dict) else None
        return float(seconds) if isinstance(seconds, int | float) else 0.0

    def put_budget_spent(self, key: str, seconds: float, device: str | None = None) -> None:
        """Records a search that found no config within its budget, in a file beside that of the configs."""
        self._file(device, "searches").write({key: {"budget_spent": max(seconds, self.budget_spent(key, device))}})

    def path_of(self, device: str | None = None, kind: str = "configs") -> str:
        """The file for `device`; the file of its configs is a table, which may be copied and read with `load_table`."""
        folder = self._path or cache_directory()
        folder = folder if kind == "configs" else os.path.join(os.fspath(folder), kind)
        return path_in(folder, device or device_fingerprint())

    def _file(self, device: str | None, kind: str = "configs") -> SharedFile:
        path = self.path_of(device, kind)
        return self._files.get(path) or self._files.setdefault(path, SharedFile(path, kind))


def entry_of(config: Any, tried: tuple[int, int] | None = None) -> dict[str, Any]:
    """The entry for a config that has just been measured: the config, the date and the commit.

    Raises:
        TypeError: the config cannot be stored.
    """
    return pack(config) | {"measured": provenance()} | ({} if tried is None else {"tried": tried})


def _unpacked(file: SharedFile, entry: Any, cls: type | None) -> Any | None:
    if entry is None:
        return None
    try:
        return unpack(entry, cls)
    except Exception as error:  # any kind, since the constructor of the config's class runs
        file.warn(error, "an entry was ignored")
        return None


def _date(entry: Any) -> str:
    measured = entry.get("measured") if isinstance(entry, dict) else None
    return str(measured.get("date", "")) if isinstance(measured, dict) else ""
