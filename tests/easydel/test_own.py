"""EasyDeL's own tests of attention, masks, caches, quantized layers and models fail with this library where they fail
with the release, and nowhere else.

`own.py` runs them where EASYDEL_CHECKOUT names a folder with EasyDeL's repository; `own_tests.json`, which it wrote
with ejkernel 0.0.78, lists by name those that fail there.
"""

import json
import os
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "own_tests.json").read_text())["files"]
CHECKOUT = os.environ.get("EASYDEL_CHECKOUT")

pytestmark = [
    pytest.mark.skipif(
        not list(metadata.distributions(name="easydel")),
        reason="EasyDeL is not installed; bash .ci/run nightly makes an environment with it",
    ),
    pytest.mark.skipif(
        not CHECKOUT, reason="EASYDEL_CHECKOUT names no folder with EasyDeL's repository, which alone has its own tests"
    ),
]


@cache
def found():
    """The outcomes of every file of the checkout, and what their process wrote."""
    environment = {name: x for name, x in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")}
    process = subprocess.run(
        [sys.executable, "-O", str(HERE / "own.py"), *(file for file in RECORDED if (Path(CHECKOUT) / file).exists())],
        capture_output=True,
        text=True,
        env=environment | {"EASYDEL_AUTO": "0", "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith('{"')]
    return lines[-1] if lines else {}, process.stdout + process.stderr


@pytest.mark.parametrize("file", RECORDED)
def test_what_passes_with_the_release_passes(file):
    if not (Path(CHECKOUT) / file).exists():
        pytest.skip(
            f"{CHECKOUT} has no {file}; git log --find-object={RECORDED[file]['blob']} tells the commits with it"
        )
    results, written = found()
    assert file in results, written[-3000:]
    outcomes, release = results[file], RECORDED[file]
    named = lambda outcome: {name for name in outcomes if outcomes[name] == outcome}
    assert named("failed") <= set(release.get("failed", ())), written[-10000:]
    assert len(named("passed")) >= release["passed"], f"skipped: {named('skipped')}, or not in this version of {file}"
