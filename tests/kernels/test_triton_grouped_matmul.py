"""grouped_matmul in Triton: every kernel's masks and indices, by the interpreter, with pointers in place of TMA."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Operand
from cases.grouped_matmul import beyond_32_bits

from ejkernel.kernels._target import lowering_for
from ejkernel.types import Target
from ejkernel.types.grouped_matmul import GroupedMatmulConfig

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.grouped_matmul import forward  # noqa: E402

from . import against_xla, interpreter  # noqa: E402

CONFIG = GroupedMatmulConfig(block_m=16, block_n=16, block_k=16)
OURS = [case for case in CASES if case.operation == "grouped_matmul"]


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    monkeypatch.setattr(_launch, "has_descriptors", lambda: False)
    monkeypatch.setattr(_launch, "multiprocessors", lambda: 2)


@pytest.mark.parametrize("case", OURS, ids=str)
def test_in_the_interpreter(case, interpreted):
    """Forward, backward and tangent; the groups cross blocks, and rows of no group hold NaN."""
    case = case.resized(dict(k=20, n=24))
    against_xla.check(case, against_xla.prepared(case), "triton", "gpu", CONFIG)


def test_a_gpu_of_amd(monkeypatch):
    """Its target does not tell the number of its cores."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    with lowering_for(Target("rocm", "gfx942")):
        against_xla.check(OURS[0], against_xla.prepared(OURS[0]), "triton", "gpu", CONFIG)


def test_a_batch_that_shares_the_matrices(interpreted):
    against_xla.check(OURS[0], against_xla.batched(OURS[0]), "triton", "gpu", CONFIG)


def test_matrices_of_empty_groups_may_be_nan(interpreted):
    case = replace(OURS[0], operands=OURS[0].operands | dict(rhs_scale=Operand("e n")))
    against_xla.check(case, against_xla.poisoned(against_xla.prepared(case)), "triton", "gpu", CONFIG)


def test_sizes_that_add_up_to_more_than_32_bits_hold(interpreted):
    """Groups past the last row are empty, and the sum does not wrap around."""
    huge = replace(OURS[0], operands={**OURS[0].operands, "group_sizes": Operand("e", beyond_32_bits)})
    against_xla.check(huge, against_xla.prepared(huge), "triton", "gpu", CONFIG)


@pytest.mark.parametrize("existing", (False, True), ids=("", "existing out"))
def test_terms_of_a_tangent_beyond_float16(existing, interpreted):
    """The terms are ±10⁵ times the result: their sum is 0, and was ∞ − ∞ in float16."""
    operands = OURS[0].operands | (dict(existing_out=Operand("m n")) if existing else {})
    case = replace(OURS[0], operands=operands, options=OURS[0].options | dict(preferred_element_type="float16"))
    x, spec, _ = against_xla.prepared(case)
    moving = type(x)(*(None,) * len(x))._replace(lhs=1e5 * x.lhs, rhs=-1e5 * x.rhs, existing_out=x.existing_out)
    found = forward.grouped_matmul_jvp(x, None, moving, spec=spec, config=CONFIG).o
    assert found.dtype == jnp.float16
    inside = int(x.group_sizes.sum())
    np.testing.assert_allclose(np.asarray(found[:, :inside], np.float32), 0, atol=0.5)
    if existing:
        np.testing.assert_array_equal(found[:, inside:], x.existing_out[:, inside:].astype(jnp.float16))
