"""lightning_indexer against its formula in float64, token by token, and with the attention that reads its lists."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernels.latent_pages import step, tree
from kernels.paged import close, in_pages, keys_of

import ejkernel
from ejkernel import lax, modules

pytestmark = pytest.mark.usefixtures("strict")

H, D = 3, 16
TABLES = ("context_lens", "block_tables", "query_start_loc", "num_seqs")


def indexed(dtype="float32", pages="float32", seed=0, **sizes):
    """Arguments. Small integers make scores exact, and many of them equal."""
    rng, x = np.random.default_rng(seed), step(seed=seed, **sizes)
    whole = lambda *shape: rng.integers(-2, 3, shape).astype(float)
    tokens, (count, page, _) = x["q_latent"].shape[0], x["pages"].shape
    arrays = dict(q=whole(tokens, H, D), weights=whole(tokens, H))
    arrays = {name: jnp.asarray(a, dtype) for name, a in arrays.items()}
    return arrays | dict(pages=in_pages(whole(count, page, D), pages)) | {name: x[name] for name in TABLES}


def formula(x, top_k):
    """The lists, by a stable sort of the scores of all keys visible to a token."""
    found = np.full((x["q"].shape[0], top_k), -1)
    for n in range(int(x["num_seqs"][0])):
        begin, end = (int(x["query_start_loc"][n + i]) for i in range(2))
        keys = keys_of(x["pages"][:, :, None], x.get("k_scale"), x["block_tables"][n])[:, 0]
        cached = int(x["context_lens"][n]) - (end - begin)
        for token in range(begin, end):
            seen = np.arange(len(keys)) <= cached + token - begin
            if "draft_mask" in x:
                told = [new for new in np.flatnonzero(x["draft_mask"][token]) if new < end - begin]
                j = np.arange(len(keys))
                seen = ((j < cached) | np.isin(j, cached + np.array(told, int))) & (cached + token >= begin)
            q, w = (np.asarray(x[name][token], np.float64) for name in ("q", "weights"))
            scores = np.where(seen, w @ np.maximum(q @ keys.T, 0), -np.inf)
            best = np.argsort(-scores, kind="stable")[: min(top_k, seen.sum())]
            found[token, : len(best)] = best
    return found


def check(x, top_k, call=lax.lightning_indexer):
    np.testing.assert_array_equal(call(**x, top_k=top_k), formula(x, top_k))


@pytest.mark.parametrize("top_k", (1, 7, 50))
@pytest.mark.parametrize("drafts", (0, 3))
def test_formula(top_k, drafts):
    check(indexed() | (dict(draft_mask=tree(drafts)) if drafts else {}), top_k)


@pytest.mark.parametrize("pages", ("bfloat16", "float8_e4m3fn", "int8"))
def test_pages_and_scales(pages):
    x = indexed("bfloat16", pages)
    count, page, _ = x["pages"].shape
    scale = 2.0 ** np.random.default_rng(1).integers(-2, 3, (count, page, 1))
    for given in (None, 0.5, jnp.asarray(scale, jnp.float32)):
        check(x if given is None else x | dict(k_scale=given), 7)


def test_one_sequence_of_many_tokens():
    """More tokens than a query tile, and several key tiles."""
    rng, (tokens, length, page) = np.random.default_rng(0), (75, 2300, 50)
    whole = lambda *shape: jnp.asarray(rng.integers(-2, 3, shape), jnp.float32)
    x = dict(q=whole(tokens, H, D), weights=whole(tokens, H), pages=whole(length // page, page, D))
    tables = dict(context_lens=[length - 3], block_tables=[range(length // page)], query_start_loc=[0, tokens])
    x |= {name: jnp.asarray(a, jnp.int32) for name, a in tables.items()} | dict(num_seqs=jnp.array([1]))
    check(x, 64, jax.jit(lax.lightning_indexer, static_argnames="top_k"))


def test_invisible_keys_may_be_nan():
    x = indexed()
    starts, contexts = np.asarray(x["query_start_loc"]), np.asarray(x["context_lens"])
    count, (_, page, d), columns = len(contexts), x["pages"].shape, x["block_tables"].shape[1]
    pool = np.random.default_rng(0).integers(-2, 3, (count * columns, page, d)).astype(np.float32)
    x |= dict(pages=jnp.asarray(pool), block_tables=jnp.arange(count * columns).reshape(count, columns))
    used = (np.arange(columns * page) < contexts[:, None]) & (np.arange(count) < int(x["num_seqs"][0]))[:, None]
    inside = np.arange(len(x["q"])) < starts[int(x["num_seqs"][0])]
    with_nan = dict(
        pages=jnp.where(used.reshape(-1, page, 1), x["pages"], jnp.nan),
        q=jnp.where(inside[:, None, None], x["q"], jnp.nan),
        weights=jnp.where(inside[:, None], x["weights"], jnp.nan),
    )
    call = partial(lax.lightning_indexer, top_k=7)
    np.testing.assert_array_equal(call(**x | with_nan), call(**x))


def test_visible_keys_without_a_score_come_last():
    """Those with a score of NaN, or of −∞ by overflow, are listed all the same; keys that are not visible are not."""
    keys = jnp.arange(16.0).at[jnp.array([2, 5])].set(jnp.array([jnp.nan, 1e38]))[:, None]
    one = dict(context_lens=jnp.array([10]), block_tables=jnp.array([[0]]), query_start_loc=jnp.array([0, 1]))
    found = lax.lightning_indexer(
        jnp.ones((1, 1, 1)), jnp.full((1, 1), -1e3), keys[None], **one, num_seqs=jnp.array([1]), top_k=12
    )
    np.testing.assert_array_equal(found, [[0, 1, 3, 4, 6, 7, 8, 9, 2, 5, -1, -1]])


def test_attention_over_all_keys_is_dense():
    """Lists that are long enough contain every key; shorter ones the best."""
    x, of_indexer = step(), indexed()
    named = lax.lightning_indexer(**of_indexer, top_k=64)
    attend = partial(lax.multi_latent_page_attention, **x, return_lse=True)
    for found, wanted in zip(attend(indices=named), attend(), strict=True):
        close(found, wanted)
    assert (attend(indices=named[:, :4])[1] <= attend()[1] + 1e-5).all()


def test_a_step_without_tokens():
    x = indexed()
    x |= {name: x[name][:0] for name in ("q", "weights")} | dict(query_start_loc=jnp.zeros(7, jnp.int32))
    named = lax.lightning_indexer(**x, top_k=7)
    assert named.shape == (0, 7)
    given = step() | dict(query_start_loc=x["query_start_loc"])
    given |= {name: given[name][:0] for name in ("q_latent", "q_rope")}
    assert lax.multi_latent_page_attention(**given, indices=named).shape == given["q_latent"].shape


def test_transforms():
    steps = [indexed(seed=seed) for seed in range(2)]
    call = partial(lax.lightning_indexer, top_k=7)
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *steps)
    mapped = jax.jit(jax.vmap(lambda x: call(**x)))(stacked)
    for one, x in zip(mapped, steps, strict=True):
        np.testing.assert_array_equal(one, formula(x, 7))
    loss = lambda q: (call(**steps[0] | dict(q=q)).astype(q.dtype) * q.sum()).sum()
    named = formula(steps[0], 7).sum()
    np.testing.assert_array_equal(jax.grad(loss)(steps[0]["q"]), np.full(steps[0]["q"].shape, named, np.float32))


def test_devices_with_steps_of_their_own():
    """In `jax.shard_map`, which checks varying axes: all arguments of a step vary, or only its lengths."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    steps = [indexed(seed=seed) for seed in range(2)]
    for split in (steps[0].keys(), {"context_lens"}):
        joined = {n: jnp.concatenate([x[n] for x in steps]) if n in split else a for n, a in steps[0].items()}
        specs = ({n: P("x") if n in split else P() for n in joined},)
        call = jax.shard_map(lambda x: lax.lightning_indexer(**x, top_k=7), mesh=mesh, in_specs=specs, out_specs=P("x"))
        wanted = [formula(steps[0] | {n: x[n] for n in split}, 7) for x in steps]
        np.testing.assert_array_equal(jax.jit(call)(joined), np.concatenate(wanted))


def test_explicit_axes_that_must_be_whole():
    """Tokens, pages, tables, scales of slots and draft masks; heads and features may be split."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    call, x = jax.jit(partial(lax.lightning_indexer, top_k=7)), indexed()
    for name, spec in (("q", P(None, None, "x")), ("pages", P(None, None, "x"))):
        placed = x | {name: jax.device_put(x[name], NamedSharding(mesh, spec))}
        np.testing.assert_array_equal(call(**placed), formula(x, 7))
    tokens, pages = x["q"].shape[0], x["pages"].shape
    x |= dict(k_scale=jnp.ones((*pages[:2], 1)), draft_mask=jnp.ones((tokens, 4), bool))
    axes = dict(
        q=(0,), weights=(0,), pages=(0, 1), context_lens=(0,), block_tables=(0,), k_scale=(0, 1), draft_mask=(0, 1)
    )
    for name, axis in ((name, axis) for name, of_name in axes.items() for axis in of_name):
        placed = x | {name: jax.device_put(x[name], NamedSharding(mesh, P(*[None] * axis, "x")))}
        with pytest.raises(ValueError, match=f"lightning_indexer: axis {axis} of {name} is sharded over 'x'; it must"):
            call(**placed)


def test_it_can_be_exported_with_a_symbolic_number_of_tokens():
    x = indexed()
    (tokens,) = jax.export.symbolic_shape("tokens")
    shape_of = lambda name, a: (tokens, *a.shape[1:]) if name in ("q", "weights") else a.shape
    types = {name: jax.ShapeDtypeStruct(shape_of(name, a), a.dtype) for name, a in x.items()}
    exported = jax.export.export(jax.jit(lambda x: lax.lightning_indexer(**x, top_k=7)))(types)
    np.testing.assert_array_equal(exported.call(x), formula(x, 7))


def test_memory_is_that_of_a_block_of_tokens():
    """Of 1024 tokens, at most 32 have their scores in memory at once, beside products with 1024 keys."""
    of = lambda dtype: lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    ints, floats, (tokens, length) = of(jnp.int32), of(jnp.float32), (1024, 65536)
    arguments = floats(tokens, H, D), floats(tokens, H), floats(length // 16, 16, D), ints(1), ints(1, length // 16)
    compiled = jax.jit(partial(lax.lightning_indexer, top_k=64)).lower(*arguments, ints(2), ints(1)).compile()
    temporary, block = compiled.memory_analysis().temp_size_in_bytes, 32 * length * 4
    assert temporary < 8 * block < tokens * length * 4, (temporary, block)


@pytest.mark.parametrize(
    "changes, error, says",
    [
        (dict(weights=jnp.zeros((30, 2))), ValueError, "weights must be [30, 3], one of each head"),
        (dict(weights=jnp.zeros((30, 3), jnp.int32)), TypeError, "weights has dtype int32; it must be a float type"),
        (dict(pages=jnp.zeros((20, 8, 24))), ValueError, "pages has 24 features but q has 16; they must be equal"),
        (dict(pages=jnp.zeros((20, 8, 16), jnp.bfloat16)), TypeError, "pages is bfloat16 but q is float32; it must be"),
        (dict(num_seqs=7), ValueError, "num_seqs is 7; there are tables of 6 sequences"),
        (dict(top_k=0), ValueError, "top_k is 0; it must be at least 1"),
        (dict(top_k=2**31), ValueError, "top_k is 2147483648; it must be a positive int of 32 bits"),
        (dict(top_k=None), TypeError, "top_k is None; it must be an int"),
        (dict(draft_mask=jnp.zeros((3, 4), bool)), ValueError, "draft_mask must be [30, drafts]"),
    ],
    ids=str,
)
def test_errors(changes, error, says):
    with pytest.raises(error) as raised:
        lax.lightning_indexer(**indexed() | dict(top_k=7) | changes)
    assert str(raised.value).startswith(f"lightning_indexer: {says}"), raised.value


def test_it_is_registered_and_explained():
    assert modules.lightning_indexer is lax.lightning_indexer
    assert ejkernel.explain("lightning_indexer", **indexed(), top_k=7).runs
