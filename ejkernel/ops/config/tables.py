"""Tables: files of tuned configs that are shipped, shared and merged.

A table is what `PersistentCache` writes, so the file of a machine is one, and a table that is copied into a cache
directory under the name of a device serves there. Its keys name device, source and versions: what does not fit is
never asked for, and tables of many devices may be merged into one.
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
"""What comes with the library, a file for each device that was measured; nothing is ever written there."""


def load_table(path: str | os.PathLike) -> ConfigCache:
    """The configs of a table; with `overlay_cache(load_table(path))` they come first.

    Those of classes that this process has not imported are left out: code is never loaded for the sake of a file. So
    are, with a warning, those whose fields make no sense.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or no table.
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
    """Adds the configs of tables to those of the table `out`, and returns how many there were to add.

    Of several for one key the last one holds.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: one is damaged, or no table. `out` is then as it was.
    """
    merged = {key: packed for path in paths for key, packed in read_entries(path).items()}
    SharedFile(out).add(merged)
    return len(merged)
