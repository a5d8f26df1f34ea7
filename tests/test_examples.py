"""Every program of examples/ runs on the CPU and prints its expected output; it asserts its claims itself."""

import importlib.util
import os
import re
import subprocess
import sys

import pages
import pytest

EXAMPLES = pages.ROOT / "examples"
PRINTS = {
    "export_reload": r"cpu, cuda, tpu: \d+ KiB with the gradient",
    "meanflow": r"loss \d.* to \d.*; mean of the samples .*",
    "own_kernel": r"Config\(rows=128\) \['ejkernel\[op=squared_relu_gate;impl=pallas\]'\]",
    "tensor_parallel": r"collectives: \['all-reduce', 'all-reduce'\]",
    "transformer_equinox": r"loss \d.* to \d.*",
    "transformer_flax": r"loss \d.* to \d.*",
}
NEEDS = {"meanflow": ("optax",), "transformer_equinox": ("equinox", "optax"), "transformer_flax": ("flax", "optax")}
LONGEST = 80


@pytest.mark.parametrize("name", PRINTS)
def test_it_runs(name, tmp_path):
    for library in NEEDS.get(name, ()):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"needs {library}: pip install -e '.[examples]'")
    environment = {**os.environ, **pages.environment(str(tmp_path)), "PYTHONPATH": str(pages.ROOT)}
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(PRINTS[name], done.stdout.strip())


def test_each_is_known_and_short():
    lengths = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lengths.keys() == PRINTS.keys()
    assert max(lengths.values()) < LONGEST, lengths
