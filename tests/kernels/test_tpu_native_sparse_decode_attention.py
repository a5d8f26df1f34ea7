"""native_sparse_decode_attention on TPU: in the interpreter that simulates the chip, and its compilation."""

from functools import partial

import jax
import numpy as np
import pytest

from ejkernel.kernels._pallas.tpu.native_sparse_decode_attention import native_sparse_decode_attention, supports
from ejkernel.primitives.native_sparse_decode_attention import NativeSparseDecodeAttentionSpec, Operands

from .sparse_decoding import CALLS, check, operands
from .tpu_compiler import TARGETS, by_generation, compiled
from .tpu_interpreter import interpreted

pytestmark = pytest.mark.usefixtures("strict")


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results(call, dtype):
    x, spec = operands(dtype, **call)
    o, blocks = interpreted(lambda x: native_sparse_decode_attention(*x, spec=spec))(x)
    check(o, blocks, x, spec, 3e-6 if dtype == "float32" else 2e-2)


def test_a_cache_that_is_not_whole_blocks_is_left_to_xla():
    x, spec = operands("float32", t=160, size=64)
    assert "a multiple of 64" in supports(spec, x, TARGETS["v5e"])


SHAPES = {
    "32 sequences of 64k, 64/4 heads of 128": (32, 65536, 64, 4, 128, 64),
    "8 sequences of 4k, 8/8 heads of 64": (8, 4096, 8, 8, 64, 32),
    "one of 16k, 64/1 heads of 192": (1, 16384, 64, 1, 192, 64),
}


@by_generation
@pytest.mark.parametrize("dtype", ("bfloat16", pytest.param("float32", marks=pytest.mark.slow)))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_compiles(shape, dtype, generation):
    pytest.importorskip("libtpu")
    (b, t, h, g, d, size), spec = shape, NativeSparseDecodeAttentionSpec(shape[-1], 0.1, 512)
    array, of = (
        lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype),
        partial(jax.ShapeDtypeStruct, dtype=np.int32),
    )
    k, means, gate = array(b, t, g, d), array(b, t // size, g, d), array(b, h)
    x = Operands(array(b, h, d), k, k, of((b,)), means, means, gate, gate, gate, of((1, 16)))
    assert supports(spec, x, TARGETS[generation]) is None
    program = compiled(lambda *x: native_sparse_decode_attention(*x, None, spec=spec), generation, *x[:-1])
    if d % 128 == 0:  # the layout of an argument with other features is not the one that kernels take
        assert program.memory_analysis().temp_size_in_bytes < k.size * k.dtype.itemsize / 100
