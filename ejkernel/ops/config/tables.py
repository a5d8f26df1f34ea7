"""Tables: files of tuned configs that are shipped, shared and merged.

A table has the format of `PersistentCache`: the file of a machine is a table, and a table copied into a cache directory
under the name of a device is used there. Keys include device, source and versions, so entries that do not fit are
never looked up, and tables of many devices may be merged into one.
"""

import os
import warnings
from collections.abc import Iterable
from pathlib import Path

from ejkernel.types import OperationConfig, checked_config

from ..utils.serialization import unpack
from ..utils.shared_file import SharedFile, read_entries
from .cache import ConfigCache
from .persistent import PersistentCache

SHIPPED = PersistentCache(Path(__file__).parents[2] / "modules/tuned")
"""The tables in the library, a file for each measured device. They are only read."""


def load_table(path: str | os.PathLike) -> ConfigCache:
    """The configs of a table; `overlay_cache(load_table(path))` makes them come first.

    Configs of classes that this process has not imported are skipped: a file never causes code to be imported. Configs
    with invalid fields are skipped with a warning.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or not a table.
    """
    table = ConfigCache()
    for key, packed in read_entries(path).items():
        if (config := unpack(packed)) is None:
            continue
        try:
            if isinstance(config, OperationConfig):
                config = checked_config(key.partition("@")[0], config, type(config))
            table.put(key, config)
        except (TypeError, ValueError) as error:
            warnings.warn(f"ejkernel: {os.fspath(path)}: an entry is left out: {error}", UserWarning, stacklevel=2)
    return table


def merge_tables(paths: Iterable[str | os.PathLike], out: str | os.PathLike) -> int:
    """Adds the configs of tables to the table `out`, and returns how many they have.

    Of several configs for one key the last one is kept.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: one is damaged, or not a table. `out` is then unchanged.
    """
    merged = {key: packed for path in paths for key, packed in read_entries(path).items()}
    SharedFile(out).add(merged)
    return len(merged)
