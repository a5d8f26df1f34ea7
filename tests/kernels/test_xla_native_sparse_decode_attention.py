"""A step of decoding is a row of native_sparse_attention, if its caller keeps the means of blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import lax

pytestmark = pytest.mark.usefixtures("strict")

B, S, H, G, D, V, SIZE = 2, 24, 4, 2, 8, 12, 4
CALL = dict(block_counts=3, block_size=SIZE, window=5)


def arrays():
    rng = np.random.default_rng(0)
    shapes = dict(q=(B, S, H, D), k=(B, S, G, D), v=(B, S, G, V), gates=(3, B, S, H))
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def with_mean(means, x, end):
    """The means with that of the last block that has ended, of each sequence."""

    def of_one(means, x, end):
        block = end // SIZE - 1
        mean = jax.lax.dynamic_slice_in_dim(x, block * SIZE, SIZE).mean(0)
        return means.at[jnp.where(block < 0, len(means), block)].set(mean, mode="drop")

    return jax.vmap(of_one)(means, x, end)


@jax.jit
def step(cache, token, i):
    """Writes a token into the cache, and attends with its query."""
    k, v, k_cmp, v_cmp, end = cache
    rows = jnp.arange(B)
    k, v = k.at[rows, end].set(token["k"]), v.at[rows, end].set(token["v"])
    end = end + 1
    k_cmp, v_cmp = with_mean(k_cmp, k, end), with_mean(v_cmp, v, end)
    out = lax.native_sparse_decode_attention(
        token["q"], k, v, end, k_cmp, v_cmp, *token["gates"], **CALL, return_block_indices=True
    )
    return (k, v, k_cmp, v_cmp, end), out


def test_steps_are_rows():
    """Over a cache of NaN, in which each step writes a token."""
    x = arrays()
    wanted, blocks = lax.native_sparse_attention(x["q"], x["k"], x["v"], *x["gates"], **CALL, return_block_indices=True)
    empty = lambda count, e: jnp.full((B, count, G, e), jnp.nan, jnp.float32)
    cache = (empty(S, D), empty(S, V), empty(S // SIZE, D), empty(S // SIZE, V), jnp.zeros(B, jnp.int32))
    for i in range(S):
        token = {name: a[:, i] for name, a in x.items() if name != "gates"} | {"gates": x["gates"][:, :, i]}
        cache, (o, chosen) = step(cache, token, i)
        np.testing.assert_array_equal(chosen, blocks[:, i])
        np.testing.assert_allclose(o, wanted[:, i], atol=2e-6)


def test_means_in_float32_choose_as_the_means_of_all_keys():
    """In bfloat16, where means that are rounded choose other blocks."""
    q, k = (jax.random.normal(jax.random.key(n), (B, 4096, h, D), jnp.bfloat16) for n, h in enumerate((H, G)))
    means = k.reshape(B, -1, SIZE, G, D).mean(2, dtype=jnp.float32)
    end = jnp.full(B, 4096, jnp.int32)
    decode = lambda means: lax.native_sparse_decode_attention(
        q[:, -1], k, k, end, means, block_size=SIZE, block_counts=16, return_block_indices=True
    )[1]
    wanted = lax.native_sparse_blocks(q[:, -1:], k, block_size=SIZE, block_counts=16)[:, -1]
    np.testing.assert_array_equal(decode(means), wanted)
    assert (decode(means.astype(jnp.bfloat16)) != wanted).any()


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_means_of_16_bits_choose_as_the_same_numbers_in_float32(dtype):
    """Their products are exact in float32."""
    q, k = (jax.random.normal(jax.random.key(n), (B, 4096, h, D), dtype) for n, h in enumerate((H, G)))
    means = k.reshape(B, -1, SIZE, G, D).mean(2)
    decode = lambda means: lax.native_sparse_decode_attention(
        q[:, -1], k, k, jnp.full(B, 4090), means, block_size=SIZE, block_counts=16, return_block_indices=True
    )[1]
    np.testing.assert_array_equal(decode(means), decode(means.astype(jnp.float32)))


def test_one_program_has_every_length():
    x = arrays()
    k_cmp = x["k"].reshape(B, -1, SIZE, G, D).mean(2)
    decode = jax.jit(
        lambda q, end: lax.native_sparse_decode_attention(
            q, x["k"], x["v"], end, k_cmp, block_counts=2, block_size=SIZE
        )
    )
    for end in (0, 1, SIZE, S, S + 7):
        found = decode(x["q"][:, 0], jnp.array([end, S], jnp.int32))
        if end == 0:
            np.testing.assert_array_equal(found[0], 0)
        else:
            whole = min(end, S)
            wanted = lax.native_sparse_attention(
                x["q"][:1, :1], x["k"][:1, :whole], x["v"][:1, :whole], block_counts=2, block_size=SIZE
            )
            np.testing.assert_allclose(found[0], wanted[0, 0], atol=2e-6)
    assert decode._cache_size() == 1


def call(**changed):
    x = arrays()
    means = lambda name: x[name].reshape(B, -1, SIZE, *x[name].shape[2:]).mean(2)
    given = dict(q=x["q"][:, 0], k=x["k"], v=x["v"], sequence_end=jnp.full(B, S, jnp.int32), k_cmp=means("k"))
    return lax.native_sparse_decode_attention(**{**given, "block_size": SIZE} | changed)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    (
        (dict(k_cmp=None), ValueError, "k_cmp, the mean keys of blocks, is not given; blocks are chosen by them"),
        (dict(g_cmp=jnp.ones((B, H))), ValueError, "v_cmp and g_cmp are values and gate of the compressed branch"),
        (dict(v_cmp=jnp.ones((B, 6, G, V))), ValueError, "give both or neither"),
        (dict(g_swa=jnp.ones((B, H))), ValueError, "g_swa is given without a window"),
        (dict(block_indices=jnp.zeros((B, G, 2), jnp.int32)), ValueError, "k_cmp is given, but no branch reads it"),
        (dict(k_cmp=jnp.ones((B, 5, G, D))), ValueError, "k_cmp has 5 means; 24 keys have 6 blocks of 4"),
        (dict(k_cmp=jnp.ones((B, 6, G, D + 1))), ValueError, "k_cmp must be k with blocks for keys"),
        (dict(sequence_end=jnp.ones(B + 1, jnp.int32)), ValueError, r"sequence_end must be \[2\]"),
        (dict(sequence_end=jnp.ones(B)), TypeError, "sequence_end"),
        (dict(q=jnp.ones((B, 1, H, D))), ValueError, "q has 4 axes; it must have 3"),
        (dict(softmax_scale=jnp.ones(())), TypeError, "softmax_scale must be a static number"),
        (dict(block_size=0), ValueError, "block_size is 0"),
    ),
)
def test_errors(changed, error, says):
    with pytest.raises(error, match=f"native_sparse_decode_attention: .*{says}"):
        call(**changed)
