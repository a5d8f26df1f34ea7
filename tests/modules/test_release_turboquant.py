"""TurboQuant's cache and two operations as EasyDeL 0.3.0 calls them: positions, specs, block tables, options."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel import lax, modules

pytestmark = pytest.mark.usefixtures("release_types")

H, G, D, PAGES, PAGE, N, COLUMNS, TOKENS = 4, 2, 16, 12, 8, 3, 4, 8
HEADS, PAGES_4D, PAGES_3D = P(None, "tp", None), P(None, None, "tp", None), P(None, None, "tp")
POOLS = ("key_indices_pages", "key_signs_pages", "key_norms_pages", "value_indices_pages", "value_norms_pages")
NAMES = ("context_lens", "block_tables", "query_start_loc", "num_seqs")
MATRICES = ("rotation_matrix", "qjl_projection", "key_codebook", "value_codebook")


def constants(bits=4, qjl_dim=D, seed=42, layer=3):
    """The matrices of a layer, by the functions that EasyDeL imports."""
    of = lambda name: importlib.import_module(f"ejkernel.quantization.turboquant.{name}")
    books = [of("codebook").solve_lloyd_max(bits=b, dim=D).centroids for b in (bits - 1, bits)]
    seed += 1000 * layer
    rotation = of("matrices").generate_rotation_matrix(seed=seed, head_dim=D)
    projection = of("matrices").generate_projection_matrix(seed=seed + 500, projection_dim=qjl_dim, head_dim=D)
    return rotation, projection, *map(jnp.array, books)


def cache(qjl_dim=D):
    shape = (PAGES, PAGE, G)
    shapes = (*shape, D // 2), (*shape, qjl_dim // 8), (*shape, 2), (*shape, D // 2), shape
    dtypes = jnp.uint8, jnp.uint8, jnp.bfloat16, jnp.uint8, jnp.bfloat16
    return tuple(jnp.zeros(s, t) for s, t in zip(shapes, dtypes, strict=True))


def step(dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    random = lambda heads: jnp.asarray(rng.standard_normal((TOKENS, heads, D)), dtype)
    tables = jnp.asarray(rng.permutation(PAGES).reshape(N, COLUMNS), jnp.int32)
    return random(H), random(G), random(G), jnp.array([6, 9, 0]), tables, jnp.array([0, 5, 6, 6])


def mesh():
    return jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2])


def by_name(pools, matrices, *tables):
    rows = zip((*POOLS, *MATRICES, *NAMES), (*pools, *matrices, *tables), strict=True)
    return dict(rows)


def assert_next_to(found, right):
    """XLA sums in another order over a mesh, so that a rounded sum may differ by one unit in the last place."""
    np.testing.assert_allclose(np.float32(found), np.float32(right), rtol=float(jnp.finfo(found.dtype).eps), atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "qjl_dim"), [(4, D), (2, 24)])
def test_the_third_version_and_then_the_second(bits, qjl_dim):
    (q, k, v, lens, tables, starts), matrices, pools = step(), constants(bits, qjl_dim), cache(qjl_dim)
    sinks = jnp.arange(H, dtype=jnp.float32)
    of_pools = (PAGES_4D, PAGES_4D, PAGES_4D, PAGES_4D, PAGES_3D)
    common = dict(softmax_scale=0.3, logits_soft_cap=None, sliding_window=None, bits=bits, qjl_dim=qjl_dim, mesh=mesh())
    third = lambda q, k, v, *pools: modules.ragged_page_attention_v3_turboquant(
        *(q, k, v, *pools, lens, tables.reshape(-1), starts, jnp.array([1, 1, 2]), *matrices, sinks),
        in_specs=(HEADS, HEADS, HEADS, *of_pools, *[P()] * 8, P("tp")),
        out_specs=(HEADS, *of_pools),
        cfg=None,
        platform="xla",
        **common,
    )
    o, *new = jax.jit(third)(q, k, v, *pools)
    arrays = by_name(pools, matrices, lens, tables, starts, jnp.array([2]))
    wanted = lax.ragged_page_attention_v3_turboquant(q, k, v, **arrays, sinks=sinks, softmax_scale=0.3)
    assert_next_to(o, wanted[0])
    for found, right in zip(new, wanted[1:], strict=True):
        np.testing.assert_array_equal(np.float32(found), np.float32(right))
    assert all(a.dtype == b.dtype for a, b in zip(new, pools, strict=True)) and np.asarray(new[0]).any()

    module = importlib.import_module("ejkernel.modules.operations.ragged_page_attention_v2_turboquant")
    for aux, platform in ((None, "auto"), (jnp.array([0.5, 1.0, 0.2]), "auto"), (None, "pallas")):
        second = lambda q, *pools, aux=aux, platform=platform: module.ragged_page_attention_v2_turboquant(
            *(q, *pools, lens, tables, starts, jnp.array([2]), *matrices, aux),
            in_specs=(HEADS, *of_pools, *[P()] * 8, None if aux is None else P(None)),
            out_specs=HEADS,
            platform=platform,
            **common,
        )
        arrays = by_name(new, matrices, lens, tables, starts, 2)
        shared = None if aux is None else jnp.broadcast_to(aux, (H, 3))
        wanted = lax.ragged_page_attention_v2_turboquant(q, **arrays, sinks=shared, softmax_scale=0.3)
        assert_next_to(jax.jit(second)(q, *new), wanted)


def test_it_approximates_attention_without_quantisation():
    """With four bits, from pages that hold two steps; the default scale is D**-0.5, as in the lax API."""
    (q, k, v, lens, tables, starts), matrices, pools = step(jnp.float32), constants(), cache()
    dense = jnp.zeros((PAGES, PAGE, 2 * G, D))
    for more in range(2):
        names = by_name(pools, matrices, lens + more * jnp.array([5, 1, 0]), tables, starts, 2)
        o, *pools = modules.ragged_page_attention_v3_turboquant(q, k, v, **names)
        tables_alone = {name: names[name] for name in NAMES}
        wanted, dense = lax.ragged_page_attention_v3(q, k, v, dense, **tables_alone)
    error = np.linalg.norm(o - wanted) / np.linalg.norm(wanted)
    assert 0.01 < error < 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(bits=3), "bits is 3 but value_codebook has 16 entries; it must have 8"),
        (dict(bits=8), "bits is 8 but key_codebook has 8 entries; it must have 256 or 128"),
        (dict(qjl_dim=128), "qjl_dim is 128 but qjl_projection has 16 rows"),
    ],
)
def test_bits_and_rows_must_match_the_matrices(options, message):
    q, k, v, lens, tables, starts = step()
    call = modules.ragged_page_attention_v3_turboquant
    with pytest.raises(ValueError, match=message):
        call(q, k, v, *cache(), lens, tables, starts, 2, *constants(), **options)


def test_codebooks_that_four_bits_do_not_index_are_refused():
    """EasyDeL allows up to eight bits but stores indices in four."""
    q, k, v, lens, tables, starts = step()
    with pytest.raises(ValueError, match="value_codebook has 32 entries; there must be from 1 to 16"):
        modules.ragged_page_attention_v3_turboquant(
            q, k, v, *cache(), lens, tables, starts, 2, *constants(bits=5), bits=5
        )
