"""native_sparse_blocks in Triton: its lists by the interpreter, beside those in plain JAX."""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._xla.native_sparse_blocks import native_sparse_blocks as by_xla
from ejkernel.types import KernelConfig

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.native_sparse_blocks import kernels  # noqa: E402

from . import interpreter  # noqa: E402
from .block_selection import CALLS, operands  # noqa: E402

pytestmark = pytest.mark.usefixtures("strict")
CONFIG = KernelConfig(block_q=16, block_k=16)


def lists(x, spec, config=CONFIG):
    (block_indices,) = kernels.native_sparse_blocks(*x, spec=spec, config=config)
    return block_indices


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_lists(call, dtype, monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x, spec = operands(dtype, **call)
    found, (wanted,) = lists(x, spec), by_xla(*x, spec=spec, config=KernelConfig(block_q=150))
    np.testing.assert_array_equal(found, wanted)


def test_what_no_query_reads_may_be_nan(monkeypatch):
    """Keys after the last complete block, and keys and queries of no sequence."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x, spec = operands("float32", cuts=(20, 61, 140))
    outside = (np.arange(150) < 20) | (np.arange(150) >= 140)
    poison = lambda a, where: jnp.where(where[None, :, None, None], jnp.nan, a)
    poisoned = x._replace(q=poison(x.q, outside), k=poison(x.k, outside))
    np.testing.assert_array_equal(lists(poisoned, spec), lists(x, spec))


def test_equal_scores_are_taken_in_order(monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x, spec = operands("float32", n=5)
    x = x._replace(k=jnp.ones_like(x.k))
    np.testing.assert_array_equal(lists(x, spec)[0, 149, 0], [18, 0, 1, 2, 3])
