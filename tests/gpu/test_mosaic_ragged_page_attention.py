"""ragged_page_attention by the Mosaic GPU kernel of a prefill, beside Triton's decode, against the definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.paged import in_pages, ragged_defined, wide

import ejkernel
from ejkernel import lax, modules
from ejkernel.kernels._pallas.gpu import ragged_page_attention as kernels
from ejkernel.kernels._pallas.gpu.ragged_page_attention import BLOCKS, MOST_KEYS_OF_TILE, forward
from ejkernel.kernels._registry import kernel_registry
from ejkernel.kernels._target import gpu_target
from ejkernel.modules._operation import OPERATIONS

from .device import ON_HOPPER

pytestmark = ON_HOPPER
# Tokens and keys of the sequences: decodes, few tokens, whole tiles and parts of one, no cache, no tokens, more tokens
# than keys. After these come tokens of no sequence.
LENGTHS = (1, 17, 512, 128, 0, 300, 40, 1)
CONTEXTS = (3001, 1500, 2600, 128, 900, 4096, 33, 70)
FEW_TOKENS = (1, 17, 30, 8, 0, 3, 12, 1)
PADDING = 13


def step(
    h=8, g=2, d=128, page=64, dtype="bfloat16", lengths=LENGTHS, contexts=CONTEXTS, window=None, seed=0, peak=1.0,
    pages_dtype=None,
):  # fmt: skip
    """Arguments with NaN in unread entries, where tables have no valid pages. `peak` is a factor of the queries."""
    rng, n, columns = np.random.default_rng(seed), len(lengths), -(-max(contexts) // page) + 1
    lengths, contexts = np.asarray(lengths), np.asarray(contexts)
    tables = rng.permutation(n * columns).reshape(n, columns)
    key = np.arange(columns * page)
    first = np.maximum(contexts - lengths - (window or contexts.max() + 1) + 1, 0)
    used = (key >= first[:, None]) & (key < contexts[:, None])
    of_pages = np.zeros((n * columns, page), bool)
    of_pages[tables] = used.reshape(n, columns, page)
    pages = rng.standard_normal((n * columns, page, 2 * g, d), np.float32)
    pages[~of_pages] = np.nan if pages_dtype != "int8" else 2**30
    tables = np.where(used.reshape(n, columns, page).any(2), tables, rng.choice([-7, 2**30], tables.shape))
    q = peak * rng.standard_normal((lengths.sum() + PADDING, h, d), np.float32)
    q[lengths.sum() :] = np.nan
    return dict(
        q=jnp.asarray(q, dtype),
        kv_pages=in_pages(pages.clip(-30, 31), pages_dtype or dtype),
        context_lens=jnp.asarray(contexts, jnp.int32),
        block_tables=jnp.asarray(tables, jnp.int32),
        query_start_loc=jnp.asarray(np.cumsum([0, *lengths]), jnp.int32),
        num_seqs=jnp.asarray([n], jnp.int32),
    )


def some_tokens(x, seed=1):
    """The tokens at the ends of sequences and tiles, and some others."""
    ends = np.asarray(x["query_start_loc"])
    near = [e + i for e in ends for i in (-1, 0, 63, 64, 127, 128)]
    total = len(x["q"])
    return sorted({t for t in [*near, *np.random.default_rng(seed).integers(0, total, 12)] if 0 <= t < total})


def computed(x, platform="pallas", **options):
    """By the kernels of a platform, whether or not they support the call."""
    operation = OPERATIONS["ragged_page_attention"]
    call = operation.prepare_arguments(**x, **options)
    operands = operation.algorithm.operands(**call.named)
    implementation = kernel_registry.find("ragged_page_attention", platform).implementation
    config = implementation.heuristic(call.spec, operands, gpu_target())
    found = jax.jit(lambda *operands: implementation(*operands, spec=call.spec, config=config))(*operands)
    return [a[0] for a in found]


def check(x, **options):
    """The error is at most twice that of XLA in the same dtype, and all other tokens are near those of Triton."""
    tokens = some_tokens(x)
    wanted = [a[tokens] for a in ragged_defined(x, tokens=tokens, **options)]
    found, xla, triton = (list(map(wide, computed(x, platform, **options))) for platform in ("pallas", "xla", "triton"))
    for ours, theirs, exact in zip(found, xla, wanted, strict=True):
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(ours[tokens][~finite], exact[~finite])
        error, allowed = (np.linalg.norm(a[tokens][finite] - exact[finite]) for a in (ours, theirs))
        assert error <= 2 * allowed + 1e-5 * np.linalg.norm(exact[finite]), (error, allowed)
    for ours, theirs in zip(found, triton, strict=True):
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
        finite = np.isfinite(ours)
        scale = 2.0**-7 if ours.ndim == 3 else 1e-5
        most = np.abs(theirs[finite]).max(initial=0)  # lse is not finite for tokens of no sequence
        np.testing.assert_allclose(ours[finite], theirs[finite], rtol=scale, atol=scale * most)
    return found


@pytest.fixture(params=("one launch", "two launches", "decodes beside prefills"))
def launches(request, monkeypatch):
    """Whether decodes are computed as prefills, those of few keys or all, whatever the number of sequences is."""
    monkeypatch.setattr(kernels, "is_one_launch", lambda *call: request.param == "one launch")
    monkeypatch.setattr(forward, "MOST_KEYS_OF_TILE", 100)
    monkeypatch.setattr(forward, "least_decodes", lambda *call: 1 if "beside" in request.param else None)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("page", (16, 64, 128))
@pytest.mark.parametrize("d", (64, 128, 192, 256))
@pytest.mark.parametrize("h, g", [(32, 8), (8, 8)])
def test_heads_features_and_pages(h, g, d, page):
    check(step(h, g, d, page))


@pytest.mark.parametrize("d", [d for d in range(16, 257, 16) if d % 64])
@pytest.mark.parametrize("lengths, page", [(LENGTHS, 16), (FEW_TOKENS, 64)], ids=("long", "few"))
@pytest.mark.parametrize("window", (None, 300))
def test_every_head_dim(lengths, page, d, window):
    check(step(d=d, page=page, lengths=lengths, window=window), window=window)


@pytest.mark.parametrize("h, g", [(12, 4), (24, 4), (16, 1), (32, 1)])
def test_heads_that_are_packed_in_part_or_altogether(h, g):
    check(step(h, g))


OPTIONS = [
    *(dict(window=300), dict(window=100), dict(softcap=20.0), dict(softmax_scale=0.3), dict(batch_invariant=True)),
    *(dict(num_splits=3), dict(num_splits=5, window=300)),
]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("d", (64, 128))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, d, dtype):
    check(step(d=d, dtype=dtype, window=options.get("window")), **options)


@pytest.mark.parametrize("d", BLOCKS)
@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
def test_tiles_of_one_warpgroup(options, d):
    """Sequences with few rows on average, but some with more than a tile."""
    x = step(d=d, lengths=FEW_TOKENS, window=options.get("window"))
    assert 4 * len(x["q"]) <= 64 * len(FEW_TOKENS)
    check(x, **options)


@pytest.mark.parametrize("page", (32, 256, 512))
def test_other_pages(page):
    check(step(page=page), window=700)


@pytest.mark.parametrize("peak", (4.0, 30.0))
def test_great_logits(peak):
    check(step(peak=peak))


@pytest.mark.parametrize("d", (64, 128))
def test_sinks(d):
    sinks = np.random.default_rng(1).standard_normal((8, 3)) + 4
    check(step(d=d) | dict(sinks=jnp.asarray(sinks, jnp.float32)))


@pytest.mark.parametrize("lengths, contexts", [((256,), (9000,)), ((100,), (8000,)), ((64, 40), (5000, 7000))], ids=str)
def test_few_sequences_are_split(lengths, contexts):
    check(step(32, 8, lengths=lengths, contexts=contexts))


def test_sinks_are_counted_in_one_split():
    sinks = np.random.default_rng(1).standard_normal((8, 2)) + 4
    check(step() | dict(sinks=jnp.asarray(sinks, jnp.float32)), num_splits=4)


@pytest.mark.parametrize("tokens", (8, 9))
def test_sequences_of_few_tokens(tokens):
    check(step(32, 8, page=16, lengths=(tokens,) * 20, contexts=range(tokens, 2000 + tokens, 100)))


def test_many_sequences():
    """More work tiles than multiprocessors, of every length."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 160, 60)
    check(step(16, 4, lengths=lengths, contexts=lengths + rng.integers(-5, 2000, 60).clip(-lengths)))


@pytest.mark.parametrize("h, g, d, page", [(32, 8, 128, 16), (16, 16, 64, 64), (16, 2, 256, 64)])
@pytest.mark.parametrize("window", (None, 300))
def test_decodes_beside_prefills(h, g, d, page, window):
    """As many as there are multiprocessors, and three of more keys than one of them is to read."""
    rng = np.random.default_rng(4)
    lengths = rng.permutation([130, 64, 17, 0, 300] + [1, 2] * 35)
    contexts = lengths + rng.integers(0, 1000, len(lengths))
    contexts[np.flatnonzero(lengths == 1)[:3]] += MOST_KEYS_OF_TILE
    check(step(h, g, d, page, lengths=lengths, contexts=contexts, window=window), window=window)


def test_a_plan_divides_the_decodes():
    x = step()
    plan = lax.page_plan(
        x["context_lens"], x["query_start_loc"], x["num_seqs"], page_size=64, num_tokens=len(x["q"]), workers=132
    )
    for a, b in zip(computed(x, plan=plan), computed(x), strict=True):
        a, b = wide(a), wide(b)
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
        np.testing.assert_allclose(a[np.isfinite(a)], b[np.isfinite(b)], atol=2e-3)


@pytest.mark.parametrize("num_seqs", (0, 2, 5))
def test_fewer_sequences_count(num_seqs):
    """Tokens after them, however many, have o = 0 and lse = −∞."""
    x = step() | dict(num_seqs=jnp.asarray([num_seqs]))
    o, lse = check(x)
    end = int(x["query_start_loc"][num_seqs])
    assert not o[end:].any() and (lse[end:] == -np.inf).all()


def test_a_rerun_has_the_same_bits():
    x = step(32, 8)
    first = computed(x)
    for _ in range(20):
        for a, b in zip(first, computed(x), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_token_has_the_same_bits_whatever_else_is_in_the_step():
    x = step()
    together = computed(x, batch_invariant=True)
    for n, (begin, end) in enumerate(zip(x["query_start_loc"][:-1], x["query_start_loc"][1:], strict=True)):
        if end - begin < 128:
            continue
        alone = x | dict(
            q=x["q"][begin:end], context_lens=x["context_lens"][n : n + 1], block_tables=x["block_tables"][n : n + 1],
            query_start_loc=jnp.asarray([0, end - begin]), num_seqs=jnp.asarray([1]),
        )  # fmt: skip
        for a, b in zip(together, computed(alone, batch_invariant=True), strict=True):
            np.testing.assert_array_equal(a[begin:end], b)


@pytest.mark.parametrize("shared", (True, False))
def test_vmap(shared):
    """Over steps, with one pool or with a pool each."""
    steps = [step(seed=n, lengths=LENGTHS[n:] + LENGTHS[:n], contexts=CONTEXTS[n:] + CONTEXTS[:n]) for n in range(2)]
    if shared:
        steps[1]["kv_pages"] = steps[0]["kv_pages"] = jnp.nan_to_num(steps[0]["kv_pages"])
    x = {name: jnp.stack([s[name] for s in steps]) for name in steps[0] if not (shared and name == "kv_pages")}
    attention = partial(lax.ragged_page_attention, return_lse=True)
    if shared:
        attention = partial(attention, kv_pages=steps[0]["kv_pages"])
    found = jax.jit(jax.vmap(lambda x: attention(**x)))(x)
    for n, s in enumerate(steps):
        for a, b in zip(found, computed(s), strict=True):
            a, b = wide(a[n]), wide(b)
            np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
            np.testing.assert_allclose(a[np.isfinite(a)], b[np.isfinite(b)], atol=2e-3)


@pytest.mark.parametrize("d", (64, 256))
def test_a_pool_of_one_page(d):
    """Its tiles do not wait for page numbers, so that more of them are in shared memory."""
    x = step(8, 2, d, lengths=(1, 70), contexts=(64, 64))
    tables = jnp.zeros_like(x["block_tables"])
    pages = jax.random.normal(jax.random.key(0), (1, *x["kv_pages"].shape[1:]), jnp.bfloat16)
    check(x | dict(kv_pages=pages, block_tables=tables))


@pytest.mark.parametrize("platform", ("pallas", "triton"))
@pytest.mark.parametrize("sliced", (False, True))
def test_within_a_scan(platform, sliced):
    """Over layers whose results are stacked, each of which reads a slice of the pages."""
    x, layers = step(), 3
    pools = jnp.stack([jnp.roll(x["kv_pages"], n, 3) for n in range(layers)])

    @jax.jit
    def scanned(x, pools):
        call = partial(modules.ragged_page_attention, return_lse=True, platform=platform)
        one = lambda carry, pool: (carry, call(**x | ({"kv_pages": pool} if sliced else {})))
        return jax.lax.scan(one, (), pools)[1]

    found = scanned(x, pools)
    for n in range(layers):
        for a, b in zip(found, computed(x | ({"kv_pages": pools[n]} if sliced else {}), platform), strict=True):
            a, b = wide(a[n]), wide(b)
            np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
            np.testing.assert_allclose(a[np.isfinite(a)], b[np.isfinite(b)], atol=2e-3)


def test_v3_writes_in_place():
    x, rng = step(), np.random.default_rng(5)
    g, d = x["kv_pages"].shape[2] // 2, x["kv_pages"].shape[3]
    k, v = (jnp.asarray(rng.standard_normal((len(x["q"]), g, d)), jnp.bfloat16) for _ in range(2))
    assert "pallas/gpu with" in str(ejkernel.explain("ragged_page_attention_v3", **x, k=k, v=v))
    o, pages = jax.jit(lax.ragged_page_attention_v3)(**x, k=k, v=v)
    wanted = kernel_registry.get("ragged_page_attention_v3", platform="xla")(**x, k=k, v=v)[1]
    np.testing.assert_array_equal(wide(pages), wide(wanted))
    np.testing.assert_array_equal(wide(o), wide(computed(x | dict(kv_pages=pages))[0]))
