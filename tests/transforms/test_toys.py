"""A new operation of any kind gets every test of this folder by registration; generic files do not change.

`tests/toys` stands for another package: it defines the operations and their cases.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
KINDS = ("toy_wave", "toy_lookup", "toy_append", "toy_beat")


def test_operations_of_another_package_have_all_tests(tmp_path):
    paths = [str(HERE.parent / "toys"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTEST_ADDOPTS": ""}
    options = (
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "-k",
        "toy_",
        "-rp",
        "--basetemp",
        str(tmp_path / "tests"),
    )
    command = [sys.executable, "-m", "pytest", *options, str(HERE)]
    ran = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-5000:]
    files = {
        kind: set(re.findall(rf"^PASSED .*/(test_\w+)\.py::\S*{kind}", ran.stdout, re.MULTILINE)) for kind in KINDS
    }
    every = {
        "test_eval",
        "test_jit",
        "test_vmap",
        "test_sharding",
        "test_export",
        "test_labels",
        "test_dtypes",
        "test_x64",
    }
    assert all(every <= found for found in files.values()), files
    derivatives = {"test_grad", "test_jvp", "test_transposition", "test_second_order"}
    assert derivatives <= files["toy_wave"] & files["toy_beat"] and "test_checkpoint" in files["toy_wave"]
    assert "test_forward_only" in files["toy_lookup"] & files["toy_append"]
