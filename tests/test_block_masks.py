"""Block masks keep the blocks with a visible pair of their pattern, checked against the mask of all pairs."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import block_masks, lax, modules

SIZES = ((40, 40, (8, 8)), (37, 50, (8, 16)), (20, 64, (7, 5)), (60, 30, (16, 8)), (5, 9, (128, 128)))
WINDOWS = (5, (3, 2), (None, 1), (0, None))
CORE, SLOW = pytest.mark.core, pytest.mark.slow
each_size = pytest.mark.parametrize(
    ("S", "K", "block_size"), [pytest.param(*size, marks=CORE if size == SIZES[0] else ()) for size in SIZES]
)
# Every size and every window runs on every change; their other combinations are slow tests.
BANDS = [
    pytest.param(*size, window, marks=CORE if n == m == 0 else () if m == n % len(WINDOWS) else SLOW)
    for n, size in enumerate(SIZES)
    for m, window in enumerate(WINDOWS)
]


def blocks_of(pairs, block_size):
    """Whether a block of […, S, K] has a visible pair."""
    pad = [(0, -n % block) for n, block in zip(pairs.shape[-2:], block_size, strict=True)]
    pairs = np.pad(pairs, [(0, 0)] * (pairs.ndim - 2) + pad)
    *leading, S, K = pairs.shape
    q, k = block_size
    return pairs.reshape(*leading, S // q, q, K // k, k).any((-3, -1))


def places(S, K):
    """i' [S, 1] and j [1, K]."""
    return np.arange(S)[:, None] + K - S, np.arange(K)[None]


@pytest.mark.parametrize(("S", "K", "block_size", "window"), BANDS)
def test_bands(S, K, block_size, window):
    i, j = places(S, K)
    np.testing.assert_array_equal(block_masks.causal(S, K, block_size), blocks_of(j <= i, block_size))
    left, right = (window - 1, 0) if isinstance(window, int) else window
    seen = (j >= (-np.inf if left is None else i - left)) & (j <= (np.inf if right is None else i + right))
    found = block_masks.sliding_window(S, K, window, block_size)
    np.testing.assert_array_equal(found, blocks_of(seen, block_size))
    found = block_masks.global_and_local(S, K, 3, window, block_size)
    np.testing.assert_array_equal(found, blocks_of(seen | (j < 3) | ((i >= 0) & (i < 3)), block_size))
    np.testing.assert_array_equal(
        block_masks.global_and_local(S, K, 0, window, block_size), blocks_of(seen, block_size)
    )


@CORE
def test_strided():
    """Written by hand: five blocks, the query's own and every third."""
    kept = np.array([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 1]], bool)
    np.testing.assert_array_equal(block_masks.strided(20, 20, 1, 3, block_size=(4, 4)), kept)
    of_heads = block_masks.strided(20, 20, 1, 3, heads=2, block_size=(4, 4))
    np.testing.assert_array_equal(of_heads[0], kept)
    np.testing.assert_array_equal(of_heads[1, 4], [False, True, False, False, True])


@pytest.mark.parametrize(
    ("S", "K", "block_size"),
    [*SIZES, (1, 1000, (128, 128)), (17, 17, (16, 4)), (10, 10, (128, 4)), (130, 257, (64, 128))],
)
def test_strided_is_of_pairs(S, K, block_size):
    """Of queries that are not aligned with blocks of keys, as in decoding, and of blocks that are not square."""
    i, j = places(S, K)
    own, column, head = i // block_size[1], j // block_size[1], np.arange(2)[:, None, None]
    pairs = (column <= own) & ((own - column < 2) | ((column + head + 1) % 3 == 0))
    found = block_masks.strided(S, K, 2, 3, heads=2, block_size=block_size)
    np.testing.assert_array_equal(found, blocks_of(pairs, block_size) & blocks_of(j <= i, block_size))


@each_size
def test_documents(S, K, block_size):
    rng = np.random.default_rng(0)
    ids = [np.sort(rng.integers(-1, 4, (2, n)), axis=1).astype(np.int32) for n in (S, K)]
    ids = [
        np.concatenate([x[:, (x < 0).sum(1).max() :], np.full((2, (x < 0).sum(1).max()), -1, np.int32)], 1) for x in ids
    ]
    pairs = (ids[0][:, :, None] == ids[1][:, None]) & (ids[0][:, :, None] >= 0)
    found = jax.jit(partial(block_masks.documents, block_size=block_size))(*map(jnp.asarray, ids))
    np.testing.assert_array_equal(found[:, 0], blocks_of(pairs, block_size))


@each_size
def test_vertical_slash(S, K, block_size):
    rng, (i, j) = np.random.default_rng(0), places(S, K)
    vertical, slash = (rng.integers(-10, K + 10, (3, n)) for n in (2, 3))
    pairs = (j == vertical[:, :, None, None]).any(1) | (i - j == slash[:, :, None, None]).any(1)
    found = jax.jit(partial(block_masks.vertical_slash, S, K, block_size=block_size))(vertical, slash)
    np.testing.assert_array_equal(found, blocks_of(pairs, block_size))


@CORE
def test_top_k():
    scores = jnp.array([[[3.0, 1.0, 2.0, 0.0], [1.0, -jnp.inf, -jnp.inf, -jnp.inf]]])
    found = jax.jit(partial(block_masks.top_k, k=2))(scores)
    np.testing.assert_array_equal(found, [[[True, False, True, False], [True, False, False, False]]])
    assert block_masks.top_k(scores, 9).sum() == 5


def test_top_k_of_equal_scores_and_of_nan():
    """Of equal ones the first are kept; NaN is never kept, and takes no block's place."""
    scores = np.array([[1.0, 2.0, 1.0, 1.0, 0.0], [np.nan, 1.0, np.nan, 3.0, 2.0]], np.float32)
    found = block_masks.top_k(scores, 3)
    np.testing.assert_array_equal(found, np.array([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1]], bool))


@pytest.mark.parametrize("dtype", (np.int8, np.uint8, np.int16, np.uint32))
def test_vertical_slash_of_any_integer_type(dtype):
    numbers = np.array([[3, 100], [0, 127]], dtype)
    wanted = block_masks.vertical_slash(1000, 1000, numbers.astype(np.int32), numbers.astype(np.int32))
    np.testing.assert_array_equal(block_masks.vertical_slash(1000, 1000, numbers, numbers), wanted)


def test_windows_of_any_size():
    """A bound may be larger than any length, and than an int of 32 bits."""
    for bound in (2**31 - 1, 2**31, 2**40):
        for S, K in ((40, 40), (60, 30)):
            everything = block_masks.sliding_window(S, K, (bound, bound), (8, 8))
            np.testing.assert_array_equal(everything, np.ones(everything.shape, bool))
            np.testing.assert_array_equal(
                block_masks.sliding_window(S, K, bound, (8, 8)), block_masks.causal(S, K, (8, 8))
            )


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("x64", (False, True))
def test_builders_for_users_who_forbid_promotion(x64):
    numbers, ids = np.zeros((2, 3), np.int16), np.zeros((2, 16), np.int32)
    with jax.enable_x64(x64):
        block_masks.strided(16, 16, 1, 2, heads=2, block_size=(4, 4))
        block_masks.documents(ids.astype(np.uint8), ids, (4, 4))
        block_masks.global_and_local(16, 16, 1, 2, (4, 4))
        block_masks.vertical_slash(16, 16, numbers, numbers, (4, 4))
        block_masks.top_k(np.ones((2, 3, 4), np.float16), 2)


def test_builders_of_a_long_context_take_little_memory():
    """MInference on 128k tokens: 1000 keys and 6000 diagonals of each of 32 heads; and 100 of 1024 blocks by scores."""
    tokens, of = 2**17, lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype)
    programs = (
        (partial(block_masks.vertical_slash, tokens, tokens), of(32, 1000), of(32, 6000)),
        (partial(block_masks.top_k, k=100), of(32, 1024, 1024, dtype=jnp.float32)),
    )
    for f, *arguments in programs:
        assert jax.jit(f).lower(*arguments).compile().memory_analysis().temp_size_in_bytes < 2**30


@CORE
@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    (
        ("causal", (-3, 4), ValueError, "S is -3; it must be from 0"),
        ("sliding_window", (8, 2.5, 4), TypeError, "K is 2.5; it must be an int"),
        ("global_and_local", (8, 8, None, 4), TypeError, "tokens is None; it must be an int"),
        ("strided", (8, 8, None, 2), TypeError, "local is None; it must be an int"),
        ("strided", (8, 8, 1, 2, 0), ValueError, "heads is 0; it must be from 1"),
        ("strided", (8, 8, 1, 2, True), TypeError, "heads is True; it must be an int"),
        ("documents", ([[0]], [[0]]), TypeError, "q_segment_ids must be an array, not list"),
        (
            "documents",
            (np.zeros(5, int), np.zeros((1, 5), int)),
            ValueError,
            "q_segment_ids has 1 axes; it must have 2",
        ),
        ("documents", (np.zeros((2, 5), int), np.zeros((3, 5), int)), ValueError, "kv_segment_ids has batch 3"),
        ("vertical_slash", (8, 8, [1], [2]), TypeError, "vertical must be an array, not list"),
        ("vertical_slash", (8, 8, np.ones(1), np.ones(1, int)), TypeError, "vertical has dtype float"),
        ("vertical_slash", (8, 8, np.ones(1, int), np.ones((), int)), ValueError, "slash has no axes"),
        ("vertical_slash", (8, 8, np.ones((2, 1), int), np.ones((3, 1), int)), ValueError, "vertical and slash must"),
        ("top_k", ([[1.0]], 2), TypeError, "scores must be an array, not list"),
        ("top_k", (np.ones((2, 3), np.float32), None), TypeError, "k is None; it must be an int"),
        ("top_k", (np.ones(3, np.float32), 1), ValueError, "scores has 1 axes; it must have two at least"),
        ("top_k", (np.ones((2, 3), np.int32), 1), TypeError, "scores has dtype int32; it must be a float type"),
    ),
)
@pytest.mark.usefixtures("types_unchecked")
def test_wrong_arguments_of_builders(name, given, error, message):
    with pytest.raises(error, match=f"{name}: {message}"):
        getattr(block_masks, name)(*given)


# --- From a function --------------------------------------------------------------------------------------------------


@each_size
def test_of_a_function(S, K, block_size):
    near = lambda i, j: abs(i - j) <= 2
    pairs = near(np.arange(S)[:, None], np.arange(K)[None])
    np.testing.assert_array_equal(lax.block_mask_of(near, S, K, block_size), blocks_of(pairs, block_size))
    first = lax.block_mask_of(lambda i, j: j < 3, S, K, block_size)
    np.testing.assert_array_equal(first, blocks_of(np.broadcast_to(np.arange(K) < 3, (S, K)), block_size))


@CORE
def test_of_a_function_of_heads_and_of_traced_arrays():
    def run(widths):
        return lax.block_mask_of(lambda i, j: abs(i - j) <= widths[:, None, None], 40, 30, (8, 8))

    widths, (i, j) = np.array([0, 5, 100]), (np.arange(40)[:, None], np.arange(30)[None])
    wanted = blocks_of(abs(i - j) <= widths[:, None, None], (8, 8))
    np.testing.assert_array_equal(jax.jit(run)(widths), wanted)
    np.testing.assert_array_equal(jax.vmap(lambda w: run(w[None])[0])(widths), wanted)


def test_of_no_token():
    assert lax.block_mask_of(lambda i, j: i >= j, 0, 30, (8, 8)).shape == (0, 4)


@CORE
def test_nothing_is_of_the_size_of_all_pairs():
    program = str(jax.make_jaxpr(lambda: lax.block_mask_of(lambda i, j: i >= j, 2**17, 2**17))())
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\b(?:bool|[a-z]\d+)\[([\d,]+)\]", program)]
    assert max(sizes) == (2**17 // 128) ** 2


@pytest.mark.parametrize(
    ("given", "error", "message"),
    (
        (dict(fn=None), TypeError, "fn is a NoneType; it must be a function"),
        (dict(fn=lambda i, j: i + j), TypeError, r"fn gives .*int32.*; it must give an array of bool"),
        (dict(fn=lambda i, j: jnp.ones((3, 5), bool)), ValueError, r"fn gives an array of shape \[3, 5\]; it must"),
        (dict(S=2.5), TypeError, "S is 2.5; it must be an int"),
        (dict(K=-1), ValueError, "K is -1; it must be from 0"),
        (dict(block_size=8), TypeError, "block_size is 8; it must be a pair of ints, of queries and keys"),
        (dict(block_size=(8, 0)), ValueError, "block_size has 0 keys; it must be a positive int"),
    ),
)
def test_wrong_arguments(given, error, message):
    with pytest.raises(error, match=f"block_mask_of: {message}"):
        lax.block_mask_of(**dict(fn=lambda i, j: i >= j, S=16, K=16, block_size=(8, 8)) | given)


def test_both_apis_and_explain_know_it():
    assert modules.block_mask_of is lax.block_mask_of
    assert ejkernel.explain("block_mask_of", lambda i, j: i >= j, 16, 16).runs


@CORE
def test_a_causal_block_mask_leaves_causal_attention_as_it_is():
    q, k, v = (jax.random.normal(jax.random.key(n), (1, 40, 2, 8)) for n in range(3))
    mask = block_masks.causal(40, 40, (8, 8))
    found = lax.blocksparse_attention(q, k, v, mask, block_size=(8, 8), causal=True)
    np.testing.assert_allclose(found, lax.flash_attention(q, k, v, causal=True), rtol=1e-5, atol=1e-6)
