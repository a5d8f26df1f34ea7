"""Importing the framework starts no backend, changes nothing, and loads nothing heavy."""

import os
import subprocess
import sys


def test_import_is_without_consequences(tmp_path):
    script = """
import os, sys
import jax
environment, config, modules = dict(os.environ), dict(jax.config.values), set(sys.modules)
import ejkernel.ops, ejkernel.modules.base
from jax.extend.backend import backends
assert dict(os.environ) == environment
assert dict(jax.config.values) == config
assert not os.listdir(os.environ["HOME"])
heavy = ("triton", "jax_triton", "jax.experimental.pallas", "jax.experimental.mosaic")
loaded = [name for name in sys.modules if name not in modules and name.startswith(heavy)]
assert not loaded, loaded
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
