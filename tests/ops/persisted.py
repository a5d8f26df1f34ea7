"""Stores of configs on disk: the file, its contents, and other processes that use it."""

import os
import subprocess
import sys
import textwrap

import shown
from shown import TUNED

from ejkernel.ops import PersistentCache

DEVICE = "cpu|cpu"


def file_in(directory):
    (file,) = directory.glob("*.json")
    return file


def process(directory, script):
    """Runs another process, with `cache` in the directory; the device is always given, so that no backend starts."""
    prelude = f"""
        import os, random, signal, sys, time, warnings
        sys.path.insert(0, {os.path.dirname(shown.__file__)!r})
        from shown import Config
        from ejkernel.ops import PersistentCache
        warnings.simplefilter("error", UserWarning)
        cache = PersistentCache({str(directory)!r})
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script)])


def stored(directory):
    """A cache with one entry, reopened."""
    PersistentCache(directory).put("key", TUNED)
    return PersistentCache(directory)
