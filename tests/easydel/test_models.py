"""EasyDeL 0.3.0 as it is on PyPI, with this library instead of the release that it pins.

Losses, gradients and greedy tokens equal those that `record.py` wrote with ejkernel 0.0.78, in float32. Every family of
models runs in its own process, with -O, since EasyDeL asserts that the version of ejkernel is "0.0.78".
"""

import json
import os
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "recorded.json").read_text())
CASES = RECORDED["cases"]

# Not `find_spec`: this folder is a package of that name on the path.
pytestmark = pytest.mark.skipif(
    not list(metadata.distributions(name="easydel")),
    reason="EasyDeL is not installed; bash .ci/run nightly makes an environment with it",
)


@cache
def found(family):
    """What every case of a family gives, and what its process wrote to stderr."""
    cases = [case for case in CASES if case.split("/")[0] == family]
    environment = {name: x for name, x in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")}
    process = subprocess.run(
        [sys.executable, "-O", str(HERE / "models.py"), *cases],
        capture_output=True,
        text=True,
        env=environment | {"EASYDEL_AUTO": "0", "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith('{"')]
    return {case: x for line in lines for case, x in line.items()}, process.stderr


def test_the_library_runs_and_not_the_release():
    code = "import ejkernel, ejkernel.lax; print(ejkernel.__version__)"
    version = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert version != RECORDED["versions"]["ejkernel"]


@pytest.mark.parametrize("case", CASES)
def test_a_model_gives_what_it_gave_with_the_release(case):
    """If the release fails or is wrong, a case is compared with the case in `as`; with `exact`, for products in
    bfloat16, its error from that float32 case may be three times that of the release.
    """
    results, stderr = found(case.split("/")[0])
    assert case in results, stderr[-3000:]
    ours, recorded = results[case], CASES[case]
    assert "error" not in ours, f"{ours['error']}\n{stderr[-3000:]}"
    release = CASES[recorded["as"]] if "as" in recorded else recorded
    assert ours["tokens"] == release["tokens"]
    if "loss" not in ours:  # of the engine
        return
    ours, release = numbers(ours), numbers(release)
    if "exact" in recorded:
        exact = numbers(CASES[recorded["exact"]])
        error = lambda of: np.linalg.norm(of / exact - 1)
        assert error(ours) <= 3 * error(release)
        return
    np.testing.assert_allclose(ours, release, rtol=1e-5)


def numbers(of):
    """The loss, the norm of its gradient, and those of each parameter's."""
    return np.array([of["loss"], of["gradient"], *(of["gradients"][name] for name in sorted(of["gradients"]))])
