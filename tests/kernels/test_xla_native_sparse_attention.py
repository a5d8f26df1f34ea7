"""native_sparse_attention and its selection of blocks: results against a formula in NumPy, and every derivative."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives

import ejkernel
from ejkernel.ops import find_labels_in_lowered

H, G, D, V, SIZE, COUNTS, WINDOW = 4, 2, 5, 6, 4, 4, 5
CALLS = {
    "square": (2, 21, 21, None),
    "short queries": (1, 7, 30, None),
    "one query": (2, 1, 33, None),
    "more queries than keys": (1, 30, 19, None),
    "packed": (1, 33, 33, (0, 9, 9, 12, 30)),
    "no block has ended": (1, 3, 3, None),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def attention(q, k, v):
    """Of one query of one head."""
    if not len(k):
        return np.zeros(v.shape[-1])
    s = k @ q / np.sqrt(D)
    p = np.exp(s - s.max())
    return p / p.sum() @ v


def blocks(q, k, position):
    """The list of one query, whose heads q [r,d] share the keys [t,d] of its sequence."""
    own, ended = position // SIZE, (position + 1) // SIZE
    means = k[: ended * SIZE].reshape(ended, SIZE, D).mean(1)
    score = sum(attention(of, means, np.eye(ended)) for of in q) if ended else np.zeros(0)
    others = sorted(range(1, min(own, ended)), key=lambda x: (-score[x], x))
    return [own, *[0] * (own > 0), *others][:COUNTS]


def formula(call, q, k, v, gates, lists=None):
    """o and the lists, a query and a head at a time."""
    B, S, K, cuts = call
    o, found = np.zeros((B, S, H, V)), np.full((B, S, G, COUNTS), -1)
    for first, stop in [(0, K)] if cuts is None else itertools.pairwise(cuts):
        for b, i, g in np.ndindex(B, S, G):
            position = i + K - S if cuts is None else i - first
            if not 0 <= position < stop - first:
                continue
            keys, values = k[b, first:stop, g], v[b, first:stop, g]
            heads = range(g * H // G, (g + 1) * H // G)
            chosen = blocks(q[b, i, list(heads)], keys, position)
            found[b, i, g, : len(chosen)] = chosen
            chosen = set(chosen if lists is None else lists[b, i, g]) - {-1}
            selected = [j for j in range(position + 1) if j // SIZE in chosen]
            near = slice(max(0, position - WINDOW + 1), position + 1)
            ended = (position + 1) // SIZE
            mean = lambda x, ended=ended: x[: ended * SIZE].reshape(ended, SIZE, x.shape[1]).mean(1)
            for h in heads:
                of = partial(attention, q[b, i, h])
                parts = (mean(keys), mean(values)), (keys[selected], values[selected]), (keys[near], values[near])
                o[b, i, h] = sum(gate[b, i, h] * of(*x) for gate, x in zip(gates, parts, strict=True))
    return o, found


def arrays_of(call, seed=0):
    B, S, K, _ = call
    rng = np.random.default_rng(seed)
    shapes = (B, S, H, D), (B, K, G, D), (B, K, G, V), (3, B, S, H)
    lists = rng.integers(-1, K // SIZE + 2, (B, S, G, 3)).astype(np.int32)
    return [rng.standard_normal(shape) for shape in shapes], lists


def operation(call, q, k, v, gates, lists=None, **options):
    cuts = {} if call[3] is None else {"cu_seqlens": np.array(call[3], np.int32)}
    options = dict(block_counts=COUNTS, block_size=SIZE, window=WINDOW) | options
    return ejkernel.lax.native_sparse_attention(q, k, v, *gates, block_indices=lists, **cuts, **options)


@each_call
def test_numbers(call, x64):
    arrays, lists = arrays_of(call)
    o, chosen = operation(call, *arrays, return_block_indices=True)
    wanted, of_formula = formula(call, *arrays)
    np.testing.assert_array_equal(chosen, of_formula)
    np.testing.assert_allclose(o, wanted, atol=1e-12)
    o, same = operation(call, *arrays, lists, return_block_indices=True)
    np.testing.assert_array_equal(same, lists)
    np.testing.assert_allclose(o, formula(call, *arrays, lists)[0], atol=1e-12)


@each_call
def test_float32_with_the_choice_fixed(call):
    (q, k, v, gates), lists = arrays_of(call)
    found = operation(call, *(jnp.asarray(x, jnp.float32) for x in (q, k, v, gates)), lists)
    np.testing.assert_allclose(found, formula(call, q, k, v, gates, lists)[0], atol=2e-6)


def product(x, y):
    return sum((a * b).sum() for a, b in zip(x, y, strict=True))


# In both cases the lists are constants of the derivatives: given ones are tested separately at night.
@each_call
@pytest.mark.parametrize(
    "given", (pytest.param(True, marks=pytest.mark.slow, id="given"), pytest.param(False, id="chosen"))
)
def test_derivatives(call, given, x64):
    """Of every array, against a finite difference: the selection does not change with so small a step."""
    arrays, lists = arrays_of(call)
    f = jax.jit(lambda *x: jnp.sum(operation(call, *x, lists if given else None) * jnp.cos(jnp.arange(V))))
    steps = [np.random.default_rng(1).standard_normal(x.shape) for x in arrays]
    e = 1e-6
    at = lambda e: f(*(x + e * t for x, t in zip(arrays, steps, strict=True)))
    slope = (at(e) - at(-e)) / (2 * e)
    gradients = jax.grad(f, (0, 1, 2, 3))(*arrays)
    np.testing.assert_allclose(product(gradients, steps), slope, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(jax.jvp(f, arrays, steps)[1], slope, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_second_order(x64):
    """Forward over reverse is reverse over reverse."""
    call = CALLS["square"]
    arrays, lists = arrays_of(call)
    f = lambda *x: jnp.sum(operation(call, *x, lists) ** 2)
    steps = [np.random.default_rng(1).standard_normal(x.shape) for x in arrays]
    gradient = jax.grad(f, (0, 1, 2, 3))
    forward = jax.jit(lambda: jax.jvp(gradient, arrays, steps)[1])()
    reverse = jax.jit(jax.grad(lambda *x: product(gradient(*x), steps), (0, 1, 2, 3)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), forward, reverse(*arrays))


@pytest.mark.slow
def test_a_traced_scale_has_a_gradient(x64):
    call = CALLS["packed"]
    arrays, _ = arrays_of(call)
    f = lambda scale: jnp.sum(operation(call, *arrays, softmax_scale=scale) ** 2)
    np.testing.assert_allclose(f(jnp.asarray(D**-0.5)), f(D**-0.5))
    slope = (f(D**-0.5 + 1e-6) - f(D**-0.5 - 1e-6)) / 2e-6
    np.testing.assert_allclose(jax.grad(f)(jnp.asarray(D**-0.5)), slope, rtol=1e-6)


@pytest.mark.parametrize("dtype", ("bfloat16", pytest.param("float16", marks=pytest.mark.slow)))
def test_a_traced_scale_rounds_no_more_than_a_number(dtype):
    """Large logits in half precision, in all branches: results and gradients are as near to those of float64."""
    arrays, lists = arrays_of(CALLS["square"])
    q, k, v, gates = (jnp.asarray(x, dtype) for x in (30 * arrays[0], *arrays[1:]))
    f = jax.jit(lambda scale, *x: operation(CALLS["square"], *x, lists, softmax_scale=scale))
    of_number = jax.jit(lambda *x: operation(CALLS["square"], *x, lists, softmax_scale=0.3))
    do = jnp.asarray(np.random.default_rng(1).standard_normal((2, 21, H, V)), dtype)

    def distances(f, *x):
        with jax.enable_x64(True):
            wide = [jnp.asarray(np.asarray(a, np.float64)) for a in (q, k, v, gates, do)]
            o, pull = jax.vjp(of_number, *wide[:4])
            exact = [np.asarray(a) for a in (o, *pull(wide[4]))]
        o, pull = jax.vjp(f, *x)
        found = [np.asarray(a, np.float64) for a in (o, *pull(do)[-4:])]
        return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, exact, strict=True)]

    traced, number = distances(f, jnp.float32(0.3), q, k, v, gates), distances(of_number, q, k, v, gates)
    assert all(a <= 1.5 * b for a, b in zip(traced, number, strict=True)), (traced, number)


def test_invisible_keys_may_be_nan():
    """Tokens of no sequence, and keys that no list names, in forward and gradient; the gates there too."""
    call = CALLS["packed"]
    (q, k, v, gates), _ = arrays_of(call)
    f = lambda *x: jnp.sum(operation(call, *x)[:, : call[3][-1]])
    wanted = jax.grad(f, (0, 1, 2, 3))(q, k, v, gates)
    poisoned = [np.array(x) for x in (q, k, v, gates)]
    for x in poisoned[:3]:
        x[:, call[3][-1] :] = np.nan
    poisoned[3][:, :, call[3][-1] :] = np.nan
    jax.tree.map(np.testing.assert_array_equal, jax.grad(f, (0, 1, 2, 3))(*poisoned), wanted)
    lists = np.zeros((1, 33, G, 1), np.int32)
    only = lambda q, k, v: jnp.sum(ejkernel.lax.native_sparse_attention(q, k, v, block_indices=lists, block_size=SIZE))
    wanted = jax.grad(only, (0, 1, 2))(q, k, v)
    k[:, SIZE:], v[:, SIZE:] = np.nan, np.nan
    jax.tree.map(np.testing.assert_array_equal, jax.grad(only, (0, 1, 2))(q, k, v), wanted)


def test_a_block_listed_twice_counts_once():
    (q, k, v, _), _ = arrays_of(CALLS["square"])
    of = lambda x: np.broadcast_to(np.array(x, np.int32), (2, 21, G, len(x)))
    f = lambda lists: ejkernel.lax.native_sparse_attention(q, k, v, block_indices=lists, block_size=SIZE)
    np.testing.assert_allclose(f(of([2, 0, 2, -5, 99])), f(of([0, 2])), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("types", (AxisType.Explicit, AxisType.Auto), ids=("explicit", "auto"))
def test_all_branches_over_a_mesh(types):
    """Batch and heads are split, forward and gradient: nothing is communicated, in batches and in packed calls."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(types,) * 2)
    for call, batch in ((CALLS["square"], "x"), (CALLS["packed"], None)):
        arrays, _ = arrays_of(call)
        arrays = [x.astype(np.float32) for x in arrays]
        place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
        placed = [place(x, batch, None, "y") for x in arrays[:3]] + [place(arrays[3], None, batch, None, "y")]
        f = lambda *x, call=call: operation(call, *x)
        pull = lambda do, *x, f=f: jax.vjp(f, *x)[1](do)
        do = np.cos(np.arange(f(*arrays).size, dtype=np.float32)).reshape(f(*arrays).shape)
        compiled = jax.jit(pull).lower(place(do, batch, None, "y"), *placed).compile()
        assert not collectives(compiled.as_text())
        found, wanted = compiled(place(do, batch, None, "y"), *placed), pull(do, *arrays)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, wanted)


@pytest.mark.slow
def test_vmap_of_each_operand():
    call = CALLS["square"]
    both = [arrays_of(call, seed)[0] for seed in range(2)]
    for n in range(4):
        stacked = [np.stack([a, b]) if i == n else a for i, (a, b) in enumerate(zip(*both, strict=True))]
        found = jax.vmap(partial(operation, call), [0 if i == n else None for i in range(4)])(*stacked)
        for j in range(2):
            alone = operation(call, *(both[j][i] if i == n else x for i, x in enumerate(both[0])))
            np.testing.assert_allclose(found[j], alone, atol=1e-5)


def test_what_it_is_composed_of():
    """Only the requested branches, and on the requested platform."""
    (q, k, v, gates), lists = arrays_of(CALLS["square"])

    def labels(*args, **options):
        lowered = jax.jit(lambda *x: ejkernel.modules.native_sparse_attention(*x, **options)).lower(*args)
        return {label.split("op=")[1].split(";config")[0].rstrip("]") for label in find_labels_in_lowered(lowered)}

    options = dict(block_size=SIZE, platform="xla")
    chosen = {"native_sparse_attention;impl=xla", "native_sparse_blocks;impl=xla"}
    assert labels(q, k, v, None, None, None, lists, **options) == {"native_sparse_attention;impl=xla"}
    assert labels(q, k, v, **options) == chosen
    assert labels(q, k, v, gates[0], **options) == chosen | {"flash_attention;impl=xla"}
    assert labels(q, k, v, sliding_window=3, **options) == chosen | {"flash_attention;impl=xla"}


def test_memory_grows_with_the_length():
    """And not with its square: the memory of the gradient at a length and at eight times that."""

    def temporary(s):
        q, k = (jax.ShapeDtypeStruct((1, s, heads, 16), jnp.float32) for heads in (4, 1))
        options = dict(block_size=16, block_counts=4, window=32)
        f = lambda q, k, v: ejkernel.lax.native_sparse_attention(q, k, v, **options).sum()
        compiled = jax.jit(jax.grad(f, (0, 1, 2))).lower(q, k, k).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(16384) < 12 * temporary(2048)


@pytest.mark.parametrize("cuts", (None, (0, 4, 9)), ids=("", "packed"))
def test_blocks_larger_than_all_keys(cuts):
    """Blocks of any number of tokens beyond all keys are alike, and take the memory of these."""
    q, k, v = (jnp.asarray(np.random.default_rng(0).standard_normal((1, 9, n, D)), jnp.float32) for n in (H, G, G))
    gates = {f"g_{name}": jnp.ones((1, 9, H)) for name in ("cmp", "slc")}
    of = lambda size: ejkernel.lax.native_sparse_attention(
        q,
        k,
        v,
        **gates,
        cu_seqlens=None if cuts is None else jnp.array(cuts),
        block_size=size,
        return_block_indices=True,
    )
    for size in (11, 2**30, 2**31 - 1):
        for found, expected in zip(of(size), of(10), strict=True):
            np.testing.assert_array_equal(found, expected)
