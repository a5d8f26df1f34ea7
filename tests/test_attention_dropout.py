"""Which weights dropout keeps is a function of only the key, the batch, the head, the query and the key position.

With values e_j, result i is row i of the weights, from which the mask can be read.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import define_prng_impl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel
from ejkernel.xla_utils.philox import philox_4x32

B, S, T, H, G, D = 4, 8, 16, 4, 2, 8
RATE = 0.4


def queries_and_keys(seed=0):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((B, S, H, D), (B, T, G, D)))


def identity(batch=B):
    """v [batch,T,G,T]: value j is the unit vector e_j."""
    return jnp.broadcast_to(jnp.eye(T)[:, None], (batch, T, G, T))


def kept(q, k, key, **options):
    """[b,s,h,t]: which weights are kept."""
    return ejkernel.lax.flash_attention(q, k, identity(len(q)), dropout_key=key, dropout_rate=RATE, **options) != 0


def by_the_formula(key, batch=B):
    """Word 0 of Philox with key (k0, k1) and counter (j, i, b, h) is at least rate·2³²."""
    b, i, h, j = jnp.indices((batch, S, H, T), jnp.uint32)
    words = philox_4x32((j, i, b, h), tuple(jax.random.key_data(key)))
    return np.asarray(words[0] >= np.uint32(round(RATE * 2**32)))


@pytest.mark.core
def test_kept_weights_are_those_of_the_formula():
    q, k = queries_and_keys()
    for seed in (0, 1):
        found = kept(q, k, jax.random.key(seed))
        np.testing.assert_array_equal(found, by_the_formula(jax.random.key(seed)))
        assert abs(found.mean() - (1 - RATE)) < 5 * (RATE * (1 - RATE) / found.size) ** 0.5
    assert not np.array_equal(by_the_formula(jax.random.key(0)), by_the_formula(jax.random.key(1)))


@pytest.mark.parametrize("blocks", ((4, 4), (3, 5), (8, 16), (128, 128)), ids=str)
def test_blocks(blocks):
    config = dict(block_q=blocks[0], block_k=blocks[1])
    found = kept(*queries_and_keys(), jax.random.key(3), config=config)
    np.testing.assert_array_equal(found, by_the_formula(jax.random.key(3)))


def test_vmap_of_queries():
    """Every example drops the same weights, since the key is the same."""
    (q, k), key = queries_and_keys(), jax.random.key(3)
    found = jax.vmap(lambda q: kept(q, k, key))(jnp.stack([q, 2 * q, -q]))
    np.testing.assert_array_equal(found, [by_the_formula(key)] * 3)


def test_vmap_of_keys():
    (q, k), keys = queries_and_keys(), jax.random.split(jax.random.key(3), 3)
    found = jax.vmap(lambda key: kept(q, k, key))(keys)
    np.testing.assert_array_equal(found, [by_the_formula(key) for key in keys])


@pytest.mark.parametrize("types", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))
def test_sharding(types):
    """Every shard of a mesh drops the weights that the whole call drops there."""
    mesh, key = jax.make_mesh((4, 2), ("x", "y"), axis_types=(types,) * 2), jax.random.key(3)
    q, k = (jax.device_put(x, NamedSharding(mesh, P("x", None, "y"))) for x in queries_and_keys())
    v = jax.device_put(identity(), NamedSharding(mesh, P("x", None, "y")))
    run = jax.jit(lambda q, k, v: ejkernel.lax.flash_attention(q, k, v, dropout_key=key, dropout_rate=RATE) != 0)
    np.testing.assert_array_equal(run(q, k, v), by_the_formula(key))


def test_mesh_of_the_modules_api():
    mesh, spec = jax.make_mesh((4, 2), ("x", "y")), P("x", None, "y")
    q, k = queries_and_keys()
    options = dict(dropout_prob=RATE, dropout_seed=3, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    found = ejkernel.modules.flash_attention(q, k, identity(), **options)
    np.testing.assert_array_equal(found != 0, by_the_formula(jax.random.key(3)))


def test_packed_is_as_padded():
    """Sequence n of a packed call drops what batch n of a padded call does."""
    (q, k), key, lengths = queries_and_keys(), jax.random.key(3), ((8, 16), (0, 5), (3, 0), (6, 9))
    pack = lambda x, side: jnp.concatenate([x[n, : length[side]] for n, length in enumerate(lengths)])
    ends = [jnp.cumsum(jnp.array([0, *side], jnp.int32)) for side in zip(*lengths, strict=True)]
    o = ejkernel.lax.flash_attention(
        pack(q, 0), pack(k, 1), pack(identity(), 1), cu_seqlens_q=ends[0], cu_seqlens_k=ends[1],
        dropout_key=key, dropout_rate=RATE,
    )  # fmt: skip
    wanted = by_the_formula(key)
    for n, (queries, keys) in enumerate(lengths):
        found = o[ends[0][n] : ends[0][n + 1]] != 0
        np.testing.assert_array_equal(found[..., :keys], wanted[n, :queries, :, :keys])
        assert not found[..., keys:].any()


@pytest.mark.core
@pytest.mark.parametrize("algorithm", ("rbg", "unsafe_rbg", "words of its own"))
def test_keys_of_other_algorithms(algorithm):
    """All of their words count: keys that are split or folded from one another, or not, drop different weights."""
    if algorithm == "words of its own":
        algorithm = define_prng_impl(
            key_shape=(2, 3),
            seed=lambda seed: jnp.zeros((2, 3), jnp.uint32).at[1, 2].set(seed.astype(jnp.uint32)),
            split=lambda key, shape: NotImplemented,
            random_bits=lambda key, width, shape: NotImplemented,
            fold_in=lambda key, data: key.at[0, 1].set(data.astype(jnp.uint32)),
        )
    keys = [jax.random.key(seed, impl=algorithm) for seed in range(3)]
    keys += [jax.random.fold_in(keys[1], n) for n in (3, 4)]
    q, k = queries_and_keys()
    found = [np.asarray(kept(q, k, key)) for key in keys]
    for n, one in enumerate(found):
        assert abs(one.mean() - (1 - RATE)) < 5 * (RATE * (1 - RATE) / one.size) ** 0.5
        assert not any(np.array_equal(one, other) for other in found[:n])
    mapped = jax.vmap(lambda key: kept(q, k, key))(jnp.stack(keys))
    np.testing.assert_array_equal(mapped, found)


@pytest.mark.core
@pytest.mark.parametrize("algorithm", ("threefry2x32", "rbg"))
def test_words_of_a_key(algorithm):
    """They are used as the key, as in `jax.random`."""
    (q, k), key = queries_and_keys(), jax.random.key(3, impl=algorithm)
    np.testing.assert_array_equal(kept(q, k, jax.random.key_data(key)), kept(q, k, key))


def test_kept_weights_are_raised_and_lse_is_not():
    """The mean over keys of the kept weights, over 1 − rate; lse is that without dropout."""
    (q, k), v = queries_and_keys(), identity()
    o, lse = ejkernel.lax.flash_attention(q, k, v, return_lse=True)
    dropped, same = ejkernel.lax.flash_attention(
        q, k, v, dropout_key=jax.random.key(3), dropout_rate=RATE, return_lse=True
    )
    np.testing.assert_allclose(dropped, np.where(by_the_formula(jax.random.key(3)), o / (1 - RATE), 0), rtol=1e-5)
    np.testing.assert_allclose(same, lse, rtol=1e-6)


def test_gradients_drop_the_same():
    """dv_j of the sum of result i is the weight (i, j)."""
    (q, k), key = queries_and_keys(), jax.random.key(3)
    call = lambda v, i: ejkernel.lax.flash_attention(q, k, v, dropout_key=key, dropout_rate=RATE)[:, i, :, 0].sum()
    weights = ejkernel.lax.flash_attention(q, k, identity(), dropout_key=key, dropout_rate=RATE)
    for i in (0, 5):
        dv = jax.grad(call)(identity(), i)[..., 0]  # [b,t,g], summed over the heads of a group
        wanted = weights[:, i].reshape(B, G, H // G, T).sum(2).transpose(0, 2, 1)
        np.testing.assert_allclose(dv, wanted, rtol=1e-5)


def test_a_key_for_each_example_on_an_explicit_mesh():
    """Examples that devices split draw what they draw alone, also where the mesh is that of a context."""
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), 4)
    q = jnp.asarray(rng.standard_normal((4, 2, 6, 4, 8)), jnp.float32)
    attend = lambda q, key: ejkernel.lax.flash_attention(q, q, q, dropout_key=key, dropout_rate=0.5)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    split = lambda x: jax.device_put(x, NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        found = jax.jit(jax.vmap(attend))(split(q), split(keys))
    for one, *given in zip(found, q, keys, strict=True):
        np.testing.assert_allclose(one, attend(*given), rtol=1e-5, atol=1e-5)
