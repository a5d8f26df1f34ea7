"""The public API in an editor: pyright accepts the right calls of tests/typed, and reports all wrong ones.

It reads the stubs of `ejkernel.lax` and `ejkernel.modules`, which are written from the signatures that functions have.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyright")
ROOT = Path(__file__).resolve().parents[2]
WRONG, RIGHT = ROOT / "tests/typed/wrong.py", ROOT / "tests/typed/right.py"


@pytest.fixture(scope="module")
def found() -> dict[Path, set[int]]:
    """The lines of each file on which pyright has an error."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", str(RIGHT), str(WRONG)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert ran.returncode in (0, 1), f"pyright does not start here: {ran.stderr}"  # 1: there are errors
    lines = {RIGHT: set(), WRONG: set()}
    for error in json.loads(ran.stdout)["generalDiagnostics"]:
        lines[Path(error["file"])].add(error["range"]["start"]["line"] + 1)
    return lines


def test_the_stubs_have_the_signatures():
    """In another process, since here the import hook of the tests changes annotations."""
    ran = subprocess.run([sys.executable, str(ROOT / "tests/stubs.py")], cwd=ROOT, timeout=600)
    assert ran.returncode == 0, "a stub is not up to date: python tests/stubs.py --write"


def test_right_calls_have_no_error(found):
    assert found[RIGHT] == set()


def test_every_wrong_call_has_one(found):
    marked = {n for n, line in enumerate(WRONG.read_text().splitlines(), 1) if "# wrong:" in line}
    assert len(marked) > 20 and found[WRONG] == marked
