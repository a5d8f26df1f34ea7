"""native_sparse_decode_attention on TPU: in the interpreter that simulates the chip, and its compilation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.tpu.native_sparse_decode_attention import native_sparse_decode_attention, supports
from ejkernel.kernels._xla.native_sparse_decode_attention import reference
from ejkernel.primitives.native_sparse_decode_attention import NativeSparseDecodeAttentionSpec, Operands

from .tpu_compiler import TARGETS, by_generation, compiled
from .tpu_interpreter import interpreted

pytestmark = pytest.mark.usefixtures("strict")
GATES = ("g_cmp", "g_slc", "g_swa")
CALLS = {
    "all branches": dict(window=37),
    "the selected branch": dict(gates=("g_slc",)),
    "no gates": dict(gates=()),
    "a window without its gate": dict(window=20, gates=("g_cmp", "g_slc")),
    "a window beyond all keys": dict(window=500),
    "given lists with duplicates": dict(listed=True, window=9),
    "groups of three heads, 24 and 40 features": dict(h=6, d=24, e=40, window=11),
    "blocks of 16": dict(size=16, window=30),
    "one group": dict(h=4, g=1),
}


def operands(dtype, b=4, t=160, h=8, g=2, d=16, e=16, n=5, size=8, window=None, gates=GATES, listed=False):
    """Keys, values and means that the queries do not see are NaN."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    end = np.asarray([0, 1, 130, t][:b], np.int32)
    hidden = lambda count, x: jnp.where((np.arange(count) >= x[:, None])[:, :, None, None], jnp.nan, 0).astype(dtype)
    k, v = normal(b, t, g, d), normal(b, t, g, e)
    means = [x.reshape(b, t // size, size, g, -1).mean(2) + hidden(t // size, end // size) for x in (k, v)]
    given = {name: normal(b, h) for name in gates if window is not None or name != "g_swa"}
    lists = dict(ranks=jnp.arange(n, dtype=jnp.int32)[None])
    if listed:
        lists = dict(block_indices=jnp.asarray(rng.integers(-2, t // size + 3, (b, g, n)), jnp.int32))
    k, v = k + hidden(t, end), v + hidden(t, end)
    v_cmp = means[1] if "g_cmp" in gates else None
    x = Operands(normal(b, h, d), k, v, jnp.asarray(end), means[0], v_cmp, **given, **lists)
    return x, NativeSparseDecodeAttentionSpec(size, d**-0.5, window)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results(call, dtype):
    x, spec = operands(dtype, **call)
    o, blocks = interpreted(lambda x: native_sparse_decode_attention(*x, spec=spec))(x)
    np.testing.assert_array_equal(blocks, reference(*x, spec=spec).blocks)
    wide = lambda a: jnp.asarray(a, jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a
    with jax.enable_x64(True):
        wanted = reference(*jax.tree.map(wide, x)._replace(ranks=None, block_indices=blocks), spec=spec).o
    tolerance = 3e-6 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(np.asarray(o, np.float64), wanted, atol=tolerance, rtol=tolerance)
    assert (np.asarray(o, np.float64)[0] == 0).all()


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
