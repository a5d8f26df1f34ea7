"""native_sparse_blocks on TPU: its lists in the interpreter that simulates the chip, and its compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.tpu.native_sparse_blocks import native_sparse_blocks, space, supports
from ejkernel.kernels._pallas.tpu.native_sparse_blocks.selection import selected
from ejkernel.kernels._xla.native_sparse_blocks import native_sparse_blocks as by_xla
from ejkernel.primitives.native_sparse_blocks import NativeSparseBlocksSpec, Operands
from ejkernel.types import KernelConfig

from .block_selection import CALLS, operands
from .tpu_compiler import TARGETS, by_generation, compiled
from .tpu_interpreter import interpreted

CALLS = CALLS | {"several chunks": dict(s=16, t=1200, size=1, h=2, g=1)}


def found(x, spec, queries=8):
    return interpreted(lambda x: selected(x, spec, queries))(x)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_lists(call, dtype):
    x, spec = operands(dtype, **call)
    (wanted,) = by_xla(*x, spec=spec, config=KernelConfig(block_q=150))
    np.testing.assert_array_equal(found(x, spec), wanted)


def test_what_no_query_reads_may_be_nan():
    """Keys and queries of no sequence."""
    x, spec = operands("float32", cuts=(20, 61, 140))
    outside = (np.arange(150) < 20) | (np.arange(150) >= 140)
    poison = lambda a: jnp.where(outside[None, :, None, None], jnp.nan, a)
    np.testing.assert_array_equal(found(x._replace(q=poison(x.q), k=poison(x.k)), spec, 16), found(x, spec, 16))


def test_equal_scores_are_taken_in_order():
    x, spec = operands("float32", n=5)
    lists = np.asarray(found(x._replace(k=jnp.ones_like(x.k)), spec))
    np.testing.assert_array_equal(lists[0, 149, 0], [18, 0, 1, 2, 3])


def test_means_that_bfloat16_rounds_to_the_same_number_differ():
    """Of eight keys one is greater by the last bit of bfloat16, so that the mean of block 10 rounds to that of all."""
    x, spec = operands("bfloat16", n=3)
    k = jnp.ones_like(x.k).at[:, 80].set(1 + 2.0**-7)
    lists = np.asarray(found(x._replace(q=jnp.ones_like(x.q), k=k), spec))
    np.testing.assert_array_equal(lists[0, 149, 0], [18, 0, 10])


SHAPES = {
    "64/4 heads of 128, 16k": (16384, 64, 4, 128),
    "64/4 heads of 128, 128k": (131072, 64, 4, 128),
    "8/8 heads of 64, 4k": (4096, 8, 8, 64),
    "40/5 heads of 128, 4k": (4096, 40, 5, 128),
    "64/1 heads of 192, 16k": (16384, 64, 1, 192),
}


@by_generation
@pytest.mark.parametrize("dtype", ("bfloat16", pytest.param("float32", marks=pytest.mark.slow)))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_config_compiles(shape, dtype, generation):
    pytest.importorskip("libtpu")
    (t, h, g, d), spec = shape, NativeSparseBlocksSpec(64, 0.1)
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
    x = Operands(array(1, t, h, d), array(1, t, g, d), array(1, 16, dtype=jnp.int32))
    assert supports(spec, x, TARGETS[generation]) is None
    for config in space(spec, x, TARGETS[generation]):
        compiled(lambda *x, config=config: native_sparse_blocks(*x, spec=spec, config=config), generation, *x[:3])


def test_what_it_refuses():
    x, spec = operands("bfloat16")
    target, refusal = TARGETS["v5e"], lambda x, spec=spec: supports(spec, x, TARGETS["v5e"])
    assert refusal(x) is None
    assert refusal(x._replace(q=x.q.astype("float16"))) == "q is float16; the matrix unit takes bfloat16 and float32"
    assert "no complete block" in refusal(x, NativeSparseBlocksSpec(151))
    wide = jax.ShapeDtypeStruct((1, 2**25, 4, 16), jnp.bfloat16)
    assert "do not fit into vector memory" in supports(spec, x._replace(q=wide, k=wide), target)
