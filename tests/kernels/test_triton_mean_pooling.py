"""mean_pooling in Triton: every kernel's masks and indices, by the interpreter."""

import pytest
from cases import CASES

from ejkernel.types.mean_pooling import MeanPoolingConfig

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.mean_pooling import kernels  # noqa: E402

from . import against_xla, interpreter  # noqa: E402

CONFIG = MeanPoolingConfig(block_s=16, block_d=16)
OURS = [case for case in CASES if case.operation == "mean_pooling"]


@pytest.mark.parametrize("case", OURS, ids=str)
@pytest.mark.parametrize("part", (64, 16), ids=("whole", "parts"))
def test_in_the_interpreter(case, part, monkeypatch):
    """Forward, backward and tangent; of whole segments, and of summed parts; other tokens hold NaN."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    monkeypatch.setattr(kernels, "SHORT_PART", part)
    case = case.resized(dict(s=80))
    against_xla.check(case, against_xla.prepared(case), "triton", "gpu", CONFIG)
