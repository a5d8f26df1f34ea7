"""native_sparse_blocks in Triton: its lists by the interpreter, beside those in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._xla.native_sparse_blocks import native_sparse_blocks as by_xla
from ejkernel.primitives.native_sparse_blocks import NativeSparseBlocksSpec, Operands
from ejkernel.types import KernelConfig

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.native_sparse_blocks import kernels  # noqa: E402

from . import interpreter  # noqa: E402

pytestmark = pytest.mark.usefixtures("strict")
CONFIG = KernelConfig(block_q=16, block_k=16)
CALLS = {
    "square": dict(b=2, s=150, t=150),
    "few queries": dict(s=9, t=150),
    "more queries than keys": dict(s=70, t=40),
    "packed": dict(b=2, s=150, t=150, cuts=(0, 3, 3, 70, 101, 150)),
    "a part is packed": dict(s=150, t=150, cuts=(20, 61, 140)),
    "one list for all": dict(s=60, t=60, h=3, g=1, n=12),
    "three features of eight": dict(s=60, t=60, d=24, size=7),
    "its own block alone": dict(s=60, t=60, n=1),
    "its own block and the first": dict(s=60, t=60, n=2),
}


def operands(dtype, b=1, s=150, t=150, h=4, g=2, d=16, n=6, size=8, cuts=None):
    normal = lambda key, *shape: jax.random.normal(jax.random.key(key), shape, jnp.float32).astype(dtype)
    cuts = None if cuts is None else jnp.asarray([cuts], jnp.int32)
    x = Operands(normal(0, b, s, h, d), normal(1, b, t, g, d), jnp.arange(n, dtype=jnp.int32)[None], cuts)
    return x, NativeSparseBlocksSpec(block_size=size, softmax_scale=d**-0.5)


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
