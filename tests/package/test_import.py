"""`import ejkernel` is cheap, and needs neither Triton nor libtpu."""

import subprocess
import sys

import pytest

FACES = "import ejkernel, ejkernel.lax, ejkernel.modules, ejkernel.ops, ejkernel.lowering"
ACCELERATORS = {"triton", "jax_triton", "libtpu"}

BLOCKED = f"""
import sys

class Missing:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in {ACCELERATORS}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing)
"""

# Of the processor, which other work on the machine does not lengthen.
ADDED_SECONDS = f"""
import time
import jax
start = time.process_time()
{FACES}
print(time.process_time() - start)
"""


def output(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.core
def test_import_needs_no_accelerator_package():
    assert output(f"{BLOCKED}\n{FACES}\nprint('imported')") == "imported\n"


@pytest.mark.core
def test_import_loads_no_accelerator_package():
    script = f"import sys, jax\nbefore = set(sys.modules)\n{FACES}\nprint({ACCELERATORS} & (set(sys.modules) - before))"
    assert output(script) == "set()\n"


@pytest.mark.core
def test_import_adds_little_to_that_of_jax():
    assert min(float(output(ADDED_SECONDS)) for _ in range(5)) < 0.3
