"""A decode step over a cache whose tokens are sharded over devices equals that over the whole cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from programs import collectives

import ejkernel
from ejkernel import lax, modules

pytestmark = pytest.mark.usefixtures("strict")

HEADS, GROUPS, D = 4, 2, 8


def mesh_of(size, types=AxisType.Auto):
    return jax.make_mesh((size,), ("x",), devices=jax.devices()[:size], axis_types=(types,))


def normal(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def dense(keys=64, dtype=jnp.float32):
    """Sequences without keys on some devices, one without any key, and NaN in keys beyond all sequences."""
    start, end = np.array([0, 3, 21, 9], np.int32), np.array([keys, 20, 22, 9], np.int32)
    hidden = ~((np.arange(keys) >= start[:, None]) & (np.arange(keys) < end[:, None]))[..., None, None]
    k, v = (jnp.where(hidden, np.nan, normal(4, keys, GROUPS, D, seed=i)).astype(dtype) for i in range(2))
    return dict(q=normal(4, HEADS, D, dtype=dtype), k=k, v=v, sequence_start=start, sequence_end=end)


def over_devices(size, types=AxisType.Auto, check_vma=True, window=None):
    """ragged_decode_attention over a cache with sharded keys: (o, lse), the same on each device."""

    def local(x, sinks):
        count = x["k"].shape[1]
        own = lambda position: (position - jax.lax.axis_index("x") * count).clip(0, count)
        end, start = x["sequence_end"], x["sequence_start"]
        start = start if window is None else jnp.maximum(start, end - window)
        parts = lax.ragged_decode_attention(x["q"], x["k"], x["v"], own(start), own(end), return_lse=True)
        return lax.merge_attention_shards(*parts, sinks, axis_name="x", heads_last=True)

    specs = dict.fromkeys(("q", "sequence_start", "sequence_end"), P()) | dict.fromkeys("kv", P(None, "x"))
    mesh = mesh_of(size, types)

    def run(x, sinks=None):
        if types == AxisType.Explicit:
            x = {name: jax.sharding.reshard(a, jax.NamedSharding(mesh, specs[name])) for name, a in x.items()}
        call = jax.shard_map(local, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), P()), check_vma=check_vma)
        return call(x, sinks)

    return jax.jit(run)


def whole(x, **options):
    wide = {name: a.astype(jnp.float32) if name in "qkv" else a for name, a in x.items()}
    return tuple(map(np.asarray, lax.ragged_decode_attention(**wide, **options, return_lse=True)))


@pytest.mark.parametrize(
    "size", (1, pytest.param(2, marks=pytest.mark.core), 4, pytest.param(8, marks=pytest.mark.slow))
)
def test_a_dense_cache(size):
    x = dense()
    assert_close(over_devices(size)(x), whole(x), 1e-6)


def test_sinks_count_once_and_a_window_moves_the_start():
    x, sinks = dense(), normal(HEADS, 2)
    assert_close(over_devices(4, window=7)(x, sinks), whole(x, sinks=sinks, window=7), 1e-6)


def test_explicit_axes_and_without_check_vma():
    x = dense()
    assert_close(over_devices(2, AxisType.Explicit)(x), whole(x), 1e-6)
    assert_close(over_devices(2, check_vma=False)(x), whole(x), 1e-6)


def test_bfloat16_errs_as_the_operation_does():
    """At most twice the error of the call over the whole cache in bfloat16."""
    x = dense(512, jnp.bfloat16)
    exact = whole(x)[0]
    distance = lambda o: np.linalg.norm(np.asarray(o, np.float32) - exact)
    alone = lax.ragged_decode_attention(**x)
    assert distance(over_devices(8)(x)[0]) <= 2 * distance(alone)


# --- Pages ------------------------------------------------------------------------------------------------------------

PAGE = 8


def paged(size, lens=(70, 9, 0, 33)):
    """A paged cache of sequences whose pages are assigned to the devices in turn, and the caches of the devices.

    Of a cache [devices · pages, page, heads, features] each device has its pages; its block tables use its own page
    numbers, and its lengths count its own tokens.
    """
    lens = np.array(lens)
    pages_of = -(-lens // PAGE)
    slots, most = int(pages_of.max()), -(-int(pages_of.max()) // size)
    k, v = (np.array(normal(len(lens), slots, PAGE, GROUPS, D, seed=i)) for i in range(2))
    position = np.arange(slots * PAGE).reshape(1, slots, PAGE)
    for x in (k, v):
        x[position >= lens[:, None, None]] = np.nan
    table = np.arange(len(lens) * slots, dtype=np.int32).reshape(len(lens), slots)
    flat = lambda x: jnp.asarray(x.reshape(-1, *x.shape[2:]))
    whole = dict(k_pages=flat(k), v_pages=flat(v), context_lens=lens.astype(np.int32), block_tables=table)
    pools = {
        name: np.full((size, len(lens) * most, *x.shape[2:]), np.nan, np.float32) for name, x in (("k", k), ("v", v))
    }
    own_lens = np.zeros((size, len(lens)), np.int32)
    for n, page in np.ndindex(len(lens), slots):
        device, place = page % size, page // size
        pools["k"][device, n * most + place], pools["v"][device, n * most + place] = k[n, page], v[n, page]
        own_lens[device, n] += np.clip(lens[n] - page * PAGE, 0, PAGE)
    own_table = np.arange(len(lens) * most, dtype=np.int32).reshape(len(lens), most)
    own = {f"{name}_pages": jnp.asarray(x.reshape(-1, *x.shape[2:])) for name, x in pools.items()}
    return whole, own | dict(context_lens=own_lens.reshape(-1), block_tables=own_table)


def paged_call(size):
    def local(q, x):
        parts = lax.page_attention(q, **x, return_lse=True)
        return lax.merge_attention_shards(*parts, axis_name="x", heads_last=True)

    specs = dict(k_pages=P("x"), v_pages=P("x"), context_lens=P("x"), block_tables=P())
    return jax.jit(jax.shard_map(local, mesh=mesh_of(size), in_specs=(P(), specs), out_specs=(P(), P())))


@pytest.mark.parametrize("size", (2, 4, pytest.param(8, marks=pytest.mark.slow)))
def test_a_paged_cache(size):
    q, (of_whole, own) = normal(4, HEADS, D), paged(size)
    wanted = lax.page_attention(q, **of_whole, return_lse=True)
    assert_close(paged_call(size)(q, own), tuple(map(np.asarray, wanted)), 1e-6)


@pytest.mark.core
def test_one_collective():
    q, (_, own) = normal(4, HEADS, D), paged(8)
    found = collectives(paged_call(8).lower(q, own).compile().as_text())
    assert found == {"all-gather": 1}


@pytest.mark.parametrize("check_vma", (True, False), ids=("checked", "unchecked"))
@pytest.mark.parametrize("types", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))
def test_the_batch_is_not_gathered(types, check_vma):
    """Beside an axis that splits the batch, o and lse are exchanged over that of the keys alone, in derivatives too."""
    mesh = jax.make_mesh((2, 2), ("b", "x"), devices=jax.devices()[:4], axis_types=(types,) * 2)
    o, lse = normal(2, 6, HEADS, D), normal(2, 6, HEADS)
    merge = lambda o, lse: lax.merge_attention_shards(o[0], lse[0], axis_name="x", heads_last=True)
    over = dict(mesh=mesh, in_specs=P("x"), out_specs=P(), axis_names={"x"}, check_vma=check_vma)
    f = jax.shard_map(merge, **over)
    placed = [jax.device_put(x, jax.NamedSharding(mesh, P("x", "b"))) for x in (o, lse)]
    auto = {"all-reduce": 1} if check_vma else {"collective-permute": 1}
    compiled = jax.jit(f).lower(*placed).compile()
    assert collectives(compiled.as_text()) == (auto if types == AxisType.Auto else {"all-gather": 1})
    assert compiled.output_shardings[0].spec[0] == "b"
    whole = lambda o, lse: lax.merge_attention(o[0], lse[0], o[1], lse[1], heads_last=True)
    assert_close(compiled(*placed), tuple(map(np.asarray, whole(o, lse))), 1e-6)
    gradient = lambda f: jax.jit(jax.grad(lambda *x: sum(jnp.sin(3 * y).sum() for y in f(*x)), (0, 1)))
    assert_close(gradient(f)(*placed), tuple(map(np.asarray, gradient(whole)(o, lse))), 1e-5)


# --- What it is besides -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", (True, False))
def test_derivatives_are_those_of_the_parts(check_vma):
    """Attention in two halves, one on each device, by flash_attention, whose lse is [B, H, S]."""
    q, k, v = (normal(1, n, HEADS, D, seed=i) for i, n in enumerate((3, 8, 8)))

    def local(q, k, v):
        return lax.merge_attention_shards(*lax.flash_attention(q, k, v, return_lse=True), axis_name="x")

    shards = P(None, "x")
    specs, results = (P(), shards, shards), (P(), P())
    f = jax.shard_map(local, mesh=mesh_of(2), in_specs=specs, out_specs=results, check_vma=check_vma)
    loss = lambda f: lambda *x: sum(jnp.sin(3 * y).sum() for y in f(*x))
    wanted = jax.grad(loss(lambda *x: lax.flash_attention(*x, return_lse=True)), (0, 1, 2))(q, k, v)
    assert_close(jax.jit(jax.grad(loss(f), (0, 1, 2)))(q, k, v), tuple(map(np.asarray, wanted)), 1e-5)


def test_both_apis_are_the_same():
    assert modules.merge_attention_shards is lax.merge_attention_shards


def test_errors():
    o, lse = normal(3, HEADS, D), normal(3, HEADS)
    with pytest.raises(ValueError, match=r"merge_attention_shards: there is no axis 'x' here"):
        lax.merge_attention_shards(o, lse, axis_name="x")
    inside = lambda *x: jax.eval_shape(
        jax.shard_map(
            lambda *x: lax.merge_attention_shards(*x, axis_name="x")[0], mesh=mesh_of(2), in_specs=P("x"), out_specs=P()
        ),
        *x,
    )
    with pytest.raises(ValueError, match=r"merge_attention_shards: lse must be .*, a number for each row of o"):
        inside(normal(6, HEADS, D), normal(2, HEADS))
    with pytest.raises(ValueError, match=r"there are 4 tokens and heads; heads_last must say how lse stands"):
        inside(normal(8, HEADS, D), normal(8, HEADS))


def test_heads_last_is_a_bool():
    o, lse = normal(4, HEADS, D), normal(4, HEADS)
    for told in (1, "yes"):
        with pytest.raises(TypeError, match=r"merge_attention: heads_last must be True or False, not"):
            lax.merge_attention(o, lse, o, lse, heads_last=told)


def test_explain_names_it():
    told = []

    def local(o, lse):
        told.append(ejkernel.explain("merge_attention_shards", o, lse, axis_name="x", heads_last=True))
        return o

    jax.eval_shape(
        jax.shard_map(local, mesh=mesh_of(2), in_specs=P("x"), out_specs=P("x")), normal(6, HEADS, D), normal(6, HEADS)
    )
    assert told[0].runs
