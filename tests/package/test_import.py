"""`import ejkernel` is cheap, and needs neither Triton nor libtpu."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

IMPORTS = "import ejkernel, ejkernel.lax, ejkernel.modules, ejkernel.ops, ejkernel.lowering"
ACCELERATORS = {"triton", "jax_triton", "libtpu"}
CHECKERS = {"beartype", "typeguard"}

BLOCKED = f"""
import sys

class Missing:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in {ACCELERATORS}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing)
"""

# CPU seconds, which depend less on other work of the machine: those of JAX, and of this library after it.
SECONDS = f"""
import time
start = time.process_time()
import jax
of_jax = time.process_time()
{IMPORTS}
print(of_jax - start, time.process_time() - of_jax)
"""


def output(script: str, cwd: Path | None = None) -> str:
    return subprocess.run([sys.executable, "-c", script], cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture
def clone(tmp_path):
    for folder in ("ejkernel", "lowering"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.core
def test_import_needs_no_accelerator_package():
    assert output(f"{BLOCKED}\n{IMPORTS}\nprint('imported')") == "imported\n"


@pytest.mark.core
def test_import_loads_no_accelerator_package():
    script = (
        f"import sys, jax\nbefore = set(sys.modules)\n{IMPORTS}\nprint({ACCELERATORS} & (set(sys.modules) - before))"
    )
    assert output(script) == "set()\n"


@pytest.mark.core
def test_types_are_checked_only_in_tests():
    """A user's arrays may be NumPy's, which no annotation admits, and no type checker is imported."""
    call = "ejkernel.lax.flash_attention(*[__import__('numpy').zeros((1, 2, 1, 4), 'float32')] * 3).shape"
    script = f"import sys\n{IMPORTS}\nprint({CHECKERS} & set(sys.modules), {call})"
    assert output(script) == "set() (1, 2, 1, 4)\n"


@pytest.mark.core
def test_objects_of_an_import_are_not_searched_for_cycles():
    """As young ones they all would be. What a program has frozen stays so."""
    watch = "import gc, jax\nfound = []\ngc.callbacks.append(lambda phase, info: found.append(info))"
    assert output(f"{watch}\n{IMPORTS}\nprint(found, gc.isenabled())") == "[] True\n"
    assert output(f"import gc, jax\ngc.freeze()\n{IMPORTS}\nprint(gc.get_freeze_count() > 10_000)") == "True\n"


@pytest.mark.core
def test_import_adds_little_to_that_of_jax(clone):
    # Compiled modules lie beside the sources, as pip leaves them.
    subprocess.run([sys.executable, "-m", "compileall", "-q", clone], check=True)
    seconds = []
    # What slows a processor down for a while slows down both, so they are compared within a process.
    while len(seconds) < 6 and (not seconds or seconds[-1][1] >= 0.5 * seconds[-1][0]):
        seconds.append(tuple(map(float, output(SECONDS, cwd=clone).split())))
    assert min(added / of_jax for of_jax, added in seconds) < 0.5, seconds


# In the folder that is imported from. Without `site`, no .pth file adds installed packages.
WHERE = f"{IMPORTS}, ejkernel.lowering._rule\nprint(ejkernel.__file__, ejkernel.lowering._rule.__file__)"


def from_folder(folder: Path, *options: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if Path(path) != ROOT)}
    return subprocess.run(
        [sys.executable, *options, "-c", WHERE], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.core
@pytest.mark.parametrize("options", [("-S",), ()], ids=["nothing installed", "another clone installed"])
def test_a_clone_imports_its_own_files(clone, options):
    found = from_folder(clone, *options)
    assert found.stdout.split() == [f"{clone}/ejkernel/__init__.py", f"{clone}/lowering/_rule.py"], found.stderr


def test_half_a_clone_says_what_is_missing(clone):
    shutil.rmtree(clone / "lowering")
    said = from_folder(clone, "-S").stderr.splitlines()[-1]
    assert said.startswith(f"ImportError: ejkernel: {clone}/lowering is missing; ") and "pip install -e ." in said
