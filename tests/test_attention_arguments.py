"""Extreme values of flash_attention's arguments have their meaning, or are rejected."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel

attend = ejkernel.lax.flash_attention
B, S, T, H, D = 2, 12, 16, 2, 8


def arrays(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((B, S, H, D), (B, T, H, D), (B, T, H, D))]


# --- Segment ids ------------------------------------------------------------------------------------------------------

SMALL = np.array([0, 1, 2, -1])
IDS = {
    "int8": np.array([0, 127, 5, -128], np.int8),
    "uint8": np.array([0, 255, 128, 7], np.uint8),
    "int16": np.array([0, 2**15 - 1, 2**8, -(2**15)], np.int16),
    "uint16": np.array([0, 2**16 - 1, 2**15, 3], np.uint16),
    "uint32": np.array([0, 2**32 - 1, 2**31, 2**31 - 1], np.uint32),
    "int64": np.array([0, 2**40, 2**32, -(2**40)], np.int64),
    "uint64": np.array([0, 2**64 - 1, 2**63, 2**32], np.uint64),
}


def ids_of(values, seed=0):
    """Of queries and of keys, several of each value."""
    of = np.random.default_rng(seed).integers(0, len(values), (B, S + T))
    return jnp.asarray(values[of[:, :S]]), jnp.asarray(values[of[:, S:]])


@pytest.mark.parametrize("name", IDS)
def test_segment_ids_of_every_type(name):
    with jax.enable_x64("64" in name):
        small = SMALL if (IDS[name] < 0).any() else np.arange(4)
        q_ids, kv_ids = ids_of(IDS[name])
        assert q_ids.dtype == name
        found, wanted = (
            jax.jit(lambda *ids: attend(*arrays(), None, None, *ids))(*ids)
            for ids in ((q_ids, kv_ids), ids_of(small.astype(np.int32)))
        )
    np.testing.assert_array_equal(found, wanted)


def test_segment_ids_of_two_types():
    """Ids of queries and keys are compared by value, not by bits."""
    q_ids = jnp.full((B, S), 2**32 - 1, jnp.uint32).at[:, :3].set(7)
    kv_ids = jnp.full((B, T), -1, jnp.int32).at[:, 4:].set(7)
    same = q_ids[:, :, None] == 7
    mask = (same & (kv_ids == 7)[:, None])[:, None]
    np.testing.assert_array_equal(
        attend(*arrays(), q_segment_ids=q_ids, kv_segment_ids=kv_ids), attend(*arrays(), mask=mask)
    )


def test_segment_ids_that_are_sharded():
    mesh = jax.make_mesh((2,), ("x",))
    split = lambda x: jax.device_put(x, NamedSharding(mesh, P("x")))
    ids = ids_of(IDS["uint32"])
    call = jax.jit(lambda q, k, v, *ids: attend(q, k, v, None, None, *ids))
    np.testing.assert_allclose(call(*map(split, (*arrays(), *ids))), call(*arrays(), *ids), rtol=1e-6)


def test_segment_ids_that_64_bits_alone_hold_are_refused_without_them():
    ids = np.full((B, S), 2**40), np.full((B, T), 2**40)
    with pytest.raises(ValueError, match="q_segment_ids has an id of 1099511627776; 64 bits need jax_enable_x64"):
        attend(*arrays(), q_segment_ids=ids[0], kv_segment_ids=ids[1])


# --- Windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("far", (2**31 - 1, 2**31, 2**40, 10**30))
@pytest.mark.parametrize("causal", (False, True))
def test_windows_beyond_the_lengths(far, causal):
    """They are unbounded, in packed sequences too."""
    calls = [lambda **window: attend(*arrays(), causal=causal, **window)]
    cuts = jnp.array([0, 5, 9])
    packed = [x[0] for x in arrays()]
    calls += [lambda **window: attend(*packed, cu_seqlens_q=cuts, cu_seqlens_k=cuts, causal=causal, **window)]
    for call in calls:
        for window in ((far, far), (far, None), (None, far)):
            np.testing.assert_array_equal(call(window=window), call())
        np.testing.assert_array_equal(call(window=far), call(window=(None, 0)))


@pytest.mark.parametrize("window", ((T - 2, None), (None, S - 2), (T - 2, S - 2)))
def test_windows_of_all_tokens_but_one(window):
    i, j = np.arange(S)[:, None] + T - S, np.arange(T)
    left, right = (10**6 if bound is None else bound for bound in window)
    mask = jnp.asarray((j >= i - left) & (j <= i + right))[None, None]
    assert not mask.all()
    np.testing.assert_allclose(attend(*arrays(), window=window), attend(*arrays(), mask=mask), rtol=1e-6)


# --- Scales and caps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", (1e4, 1e6, 1e12, 1e20, 1e38))
def test_a_large_cap_is_none(softcap):
    """To within float32's resolution of the logit's distance from it: s·(s / softcap)² / 3."""
    run = lambda softcap: jax.jit(jax.value_and_grad(lambda *x: attend(*x, softcap=softcap).sum(), (0, 1, 2)))
    assert_close(run(softcap)(*arrays()), run(None)(*arrays()), 1e-5)


def test_a_small_cap_leaves_nothing_of_the_logits():
    o = attend(*arrays(), softcap=1e-18)
    np.testing.assert_allclose(o, np.broadcast_to(arrays()[2].mean(1, keepdims=True), o.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("kind", (np.float32, np.asarray), ids=("number", "array"))
def test_numbers_of_numpy_and_arrays_of_one(kind):
    """An array of rank 0 is the number that it holds, in every option and on both sides of the library."""
    x, key, mesh = arrays(), jax.random.key(0), jax.make_mesh((1,), ("x",))
    options = lambda of: dict(softmax_scale=of(0.25), softcap=of(4.0), dropout_rate=of(0.5))
    wanted = attend(*x, dropout_key=key, **options(float))
    np.testing.assert_array_equal(attend(*x, dropout_key=key, **options(kind)), wanted)
    renamed = dict(softmax_scale=kind(0.25), logits_soft_cap=kind(4.0), dropout_prob=kind(0.5))
    for over in ({}, dict(mesh=mesh, in_specs={}, out_specs=P())):
        np.testing.assert_allclose(
            ejkernel.modules.flash_attention(*x, **renamed, **over), wanted, rtol=1e-5, atol=1e-6
        )
    assert ejkernel.explain("flash_attention", *x, dropout_key=key, **options(kind)).runs
    for call in (ejkernel.lax.recurrent, partial(ejkernel.lax.native_sparse_attention, block_size=4)):
        q, k, v = (a[:, :S] for a in x)
        np.testing.assert_array_equal(call(q, k, v, softmax_scale=kind(0.25)), call(q, k, v, softmax_scale=0.25))


REFUSED = {
    "scale": (dict(softmax_scale=1e39), "softmax_scale is 1e\\+39; it must be finite, and 1.7e\\+38 at most"),
    "negative scale": (dict(softmax_scale=-1e39), "it must be finite, and 1.7e\\+38 at most: logits are float32"),
    "scale that is no float": (dict(softmax_scale=10**400), "softmax_scale is inf; it must be finite"),
    "cap": (dict(softcap=1e39), "softcap is 1e\\+39; it must be from 2\\*\\*-60 to 3.4e\\+38, as logits are float32"),
    "small cap": (dict(softcap=1e-30), "softcap is 1e-30; it must be from 2\\*\\*-60"),
    "cap that is no float": (dict(softcap=10**400), "softcap is inf; it must be positive and finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_float32_does_not_compute_with_are_refused(name):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        attend(*arrays(), **options)


@pytest.mark.parametrize("scale", (jnp.inf, jnp.nan))
def test_a_traced_scale_follows_ieee(scale):
    assert jnp.isnan(jax.jit(lambda scale: attend(*arrays(), softmax_scale=scale))(scale)).all()


@pytest.mark.parametrize("scale", (3e3, 1e-6))
def test_a_traced_scale_of_a_recurrence_is_as_exact_as_a_static_one_in_float16(scale):
    """q times the scale is not rounded to float16."""
    q, k, v = (100 * jnp.abs(x[:, :S]) for x in arrays(jnp.float16))
    k, v = (k / 1e3, v / 1e2 / 1e3) if scale > 1 else (k, v)
    found = jax.jit(lambda scale: ejkernel.lax.recurrent(q, k, v, softmax_scale=scale))(jnp.float32(scale))
    wanted = ejkernel.lax.recurrent(q, k, v, softmax_scale=scale)
    assert found.dtype == jnp.float16 and jnp.isfinite(wanted).any() and wanted.any()
    np.testing.assert_allclose(np.float32(found), np.float32(wanted), rtol=2e-3)
