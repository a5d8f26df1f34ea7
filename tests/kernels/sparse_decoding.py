"""Calls of native_sparse_decode_attention that kernels are compared by, and what is right."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._xla.native_sparse_decode_attention import reference
from ejkernel.primitives.native_sparse_decode_attention import NativeSparseDecodeAttentionSpec, Operands

GATES = ("g_cmp", "g_slc", "g_swa")
CALLS = {
    "all branches": dict(window=37),
    "the selected branch": dict(gates=("g_slc",)),
    "no gates": dict(gates=()),
    "a window without its gate": dict(window=20, gates=("g_cmp", "g_slc")),
    "a window beyond all keys": dict(window=2**31 - 1),
    "given lists with duplicates": dict(listed=True, window=9),
    "groups of three heads, 24 and 40 features": dict(h=6, d=24, e=40, window=11),
    "blocks of 16": dict(size=16, window=30),
    "one group": dict(h=4, g=1),
}


def operands(
    dtype, b=4, t=160, h=8, g=2, d=16, e=16, n=5, size=8, window=None, gates=GATES, listed=False, of_means=None, seed=0
):
    """Sequences of no key, of one, of some, and of all; keys, values and means that they do not see are NaN."""
    rng, of_means = np.random.default_rng(seed), of_means or dtype
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    end = np.asarray([0, 1, 13 * t // 16, t][:b], np.int32)
    hidden = lambda count, x: jnp.where((np.arange(count) >= x[:, None])[:, :, None, None], jnp.nan, 0).astype(of_means)
    k, v = normal(b, t, g, d), normal(b, t, g, e)
    blocks = t // size
    mean = lambda x: x[:, : blocks * size].reshape(b, blocks, size, g, -1).mean(2, dtype=jnp.float32).astype(of_means)
    means = [mean(x) + hidden(blocks, end // size) for x in (k, v)]
    given = {name: normal(b, h) for name in gates if window is not None or name != "g_swa"}
    lists = dict(ranks=jnp.arange(n, dtype=jnp.int32)[None])
    if listed:
        lists = dict(block_indices=jnp.asarray(rng.integers(-2, blocks + 3, (b, g, n)), jnp.int32))
    k, v = (x + hidden(t, end).astype(dtype) for x in (k, v))
    v_cmp = means[1] if "g_cmp" in gates else None
    x = Operands(normal(b, h, d), k, v, jnp.asarray(end), means[0], v_cmp, **given, **lists)
    return x, NativeSparseDecodeAttentionSpec(size, d**-0.5, window)


def check(o, blocks, x: Operands, spec, tolerance: float) -> None:
    """The blocks are those of the formula, and o is that of the blocks in float64; 0 for the sequence of no key."""
    np.testing.assert_array_equal(blocks, reference(*x, spec=spec).blocks)
    wide = lambda a: jnp.asarray(a, jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a
    with jax.enable_x64(True):
        wanted = reference(*jax.tree.map(wide, x)._replace(ranks=None, block_indices=blocks), spec=spec).o
    np.testing.assert_allclose(np.asarray(o, np.float64), wanted, atol=tolerance, rtol=tolerance)
    assert (np.asarray(o, np.float64)[0] == 0).all()
