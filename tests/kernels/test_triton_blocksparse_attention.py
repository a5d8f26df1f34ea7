"""blocksparse_attention in Triton: every kernel's lists, masks and indices, by the interpreter, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._xla._blocks import within_blocks
from ejkernel.types import KernelConfig
from tests.gpu.attention_cases import CAUSAL, Case, check_near, differentiable, like
from tests.gpu.blocksparse_cases import (
    SPARSE_CASES,
    SparseCase,
    poisoned_cotangents_in_blocks,
    poisoned_in_blocks,
)

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.blocksparse_attention import (  # noqa: E402
    blocksparse_attention,
    blocksparse_attention_bwd,
    blocksparse_attention_jvp,
    lists,
)

from . import interpreter  # noqa: E402

LENGTH = 40
CONFIG = KernelConfig(block_q=16, block_k=32)


# The interpreter takes some seconds a case.
ALWAYS = (0, 3, 7, 11, 18, 24)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if n in ALWAYS else pytest.mark.slow)
        for n, case in enumerate(SPARSE_CASES)
    ],
)
def test_in_the_interpreter(case, monkeypatch):
    """Forward, backward and tangent of small float32 calls, what nobody sees in a kept block holding NaN."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x, spec = case.make(LENGTH, jnp.float32)
    wrt = tuple(name for name in differentiable(x) if name != "bias")
    moving = differentiable(x)
    tangents = x._replace(**{name: like(getattr(x, name), 1) if name in moving else None for name in x._fields})
    given = poisoned_in_blocks(x, spec)
    outputs = blocksparse_attention(*given, spec=spec, config=CONFIG)
    cotangents = like(outputs, 2)
    poisoned_ones = poisoned_cotangents_in_blocks(cotangents, x, spec)
    gradients = blocksparse_attention_bwd(given, outputs, poisoned_ones, wrt=wrt, spec=spec, config=CONFIG)
    moved = blocksparse_attention_jvp(given, outputs, poisoned_in_blocks(x, spec, tangents), spec=spec, config=CONFIG)
    results = outputs, dict(zip(wrt, gradients, strict=True)), moved
    dense, dense_tangents = within_blocks(x, spec), tangents.attention._asdict()
    check_near(results, dense, spec, cotangents, dense_tangents, jnp.float32)
