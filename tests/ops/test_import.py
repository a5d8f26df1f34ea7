"""Importing the framework starts no backend and changes no setting."""

import os
import subprocess
import sys


def test_import_is_without_consequences(tmp_path):
    script = """
import os
import jax
environment, config = dict(os.environ), dict(jax.config.values)
import ejkernel.ops, ejkernel.modules.base
assert dict(os.environ) == environment
assert dict(jax.config.values) == config
assert not os.listdir(os.environ["HOME"])
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
