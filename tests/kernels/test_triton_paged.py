"""Attention over a cache in Triton: masks, indices, splits and plans, by the interpreter, against the formula."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, assert_close
from kernels.paged import close, decode_defined, decode_step, ragged, wide

triton = pytest.importorskip("triton")
import ejkernel  # noqa: E402
from ejkernel.kernels._registry import kernel_registry  # noqa: E402
from ejkernel.kernels._target import gpu_target, lowering_for  # noqa: E402
from ejkernel.kernels._triton import _launch, _paged, flash_decoding  # noqa: E402
from ejkernel.kernels._triton import ragged_page_attention as attention  # noqa: E402
from ejkernel.modules._operation import OPERATIONS  # noqa: E402
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands  # noqa: E402
from ejkernel.types import KernelConfig, Target  # noqa: E402

from . import interpreter  # noqa: E402
from .against_xla import batched, prepared  # noqa: E402

PAGED = ("page_attention", "ragged_decode_attention", "ragged_page_attention", "ragged_page_attention_v3")
OF_PAGES = [case for case in CASES if case.operation in PAGED]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Launches run here, as for a GPU; the tile of a prefill is so small that the steps have several."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    monkeypatch.setattr(_launch, "has_ptx", lambda: False)
    monkeypatch.setattr(_paged, "prefill_sizes", lambda x: (_paged.TileConfig(16, 16, 4, 1),))
    with lowering_for(Target("cuda", "NVIDIA H200")):
        yield


def computed(operation, x, spec, **config):
    """By Triton's kernels, and by XLA's."""
    config = OPERATIONS[operation].config_class(**{"keys_per_block": 16, "num_splits": 3} | config)
    of = lambda platform: kernel_registry.find(operation, platform).implementation
    return of("triton")(*x, spec=spec, config=config), of("xla")(*x, spec=spec)


def check(operation, x, spec, **config):
    assert_close(*computed(operation, x, spec, **config), 2e-6)


# The interpreter takes seconds a case.
ALWAYS = ("window_softcap_sinks", "int8", "drafts")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{case.operation}-{case.name}", marks=[] if case.name in ALWAYS else pytest.mark.slow)
        for case in OF_PAGES
    ],
)
def test_cases(case):
    x, spec, _ = prepared(case)
    check(case.operation, without_plan(x), spec)


@pytest.mark.parametrize("operation", PAGED)
def test_a_batch(operation):
    """As `vmap` makes it: shared arrays have one entry."""
    case = next(case for case in OF_PAGES if case.operation == operation)
    x, spec, _ = batched(case)
    check(operation, without_plan(x), spec, num_splits=1)


def without_plan(x):
    """The plans of cases fit no step."""
    return x._replace(plan=None) if "plan" in x._fields else x


def operands_of(operation, x, plan=None, **options):
    """The arrays that an implementation gets for these arguments, and the spec."""
    call = OPERATIONS[operation].prepare_arguments(**x, **options)
    operands = OPERATIONS[operation].algorithm.operands(**call.named)
    return operands if plan is None else operands._replace(plan=plan), call.spec


def check_call(operation, x, plan=None, **options):
    operands, spec = operands_of(operation, x, None if plan is None else plan[None], **options)
    check(operation, operands, spec)


@pytest.mark.parametrize(
    "options",
    [
        dict(window=7),
        *(
            pytest.param(of, marks=pytest.mark.slow)
            for of in ({}, dict(softcap=1.0, num_splits=1), dict(batch_invariant=True))
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("drafts", (0, 3))
def test_prefills_beside_decodes(options, drafts):
    """Sequences of many tokens, of one, of few, and of none."""
    check_call("ragged_page_attention", ragged((23, 1, 4, 0, 9), (40, 17, 4, 8, 30), drafts=drafts), **options)


@pytest.mark.parametrize("num_splits", (1, 3))
@pytest.mark.parametrize("tiled_keys", (-1, 17, 40))
def test_decodes_that_a_prefill_has_computed_are_left_alone(num_splits, tiled_keys):
    """Those of up to so many keys, whether or not their splits are merged by another launch."""
    lengths, contexts = (9, 1, 4, 1, 0, 1), (30, 17, 40, 18, 8, 3)
    x, spec = operands_of("ragged_page_attention", ragged(lengths, contexts))
    config = OPERATIONS["ragged_page_attention"].config_class(keys_per_block=16, num_splits=num_splits)
    computed_before = dict(o=jnp.full_like(x.q, 7), lse=jnp.full(x.q.shape[:3], 7, jnp.float32))
    prefill = lambda most: (computed_before, jnp.asarray([tiled_keys], jnp.int32))
    found = attention.attended(x, spec, config, prefill, 4)
    kept = np.repeat(
        [length > 4 or keys <= tiled_keys for length, keys in zip(lengths, contexts, strict=True)], lengths
    )
    kept = np.append(kept, [True] * (x.q.shape[1] - len(kept)))
    for ours, xla in zip(
        found, kernel_registry.find("ragged_page_attention", "xla").implementation(*x, spec=spec), strict=True
    ):
        assert (np.asarray(ours)[0, kept] == 7).all()
        close(wide(ours)[0, ~kept], wide(xla)[0, ~kept], 2e-6)


@pytest.mark.parametrize("most, at_once", ((0, 16), (256, 16), (256, 2)))
@pytest.mark.parametrize("count", (3, pytest.param(0, marks=pytest.mark.slow)))
def test_tokens_of_no_sequence_have_nothing(count, most, at_once, monkeypatch):
    """In front of the first sequence and after the last, in a step of two launches and of one, and where another launch
    merges its splits.
    """
    monkeypatch.setattr(f"{_paged.__name__}.launch.MOST_TOKENS_OF_DECODES", most)
    monkeypatch.setattr(f"{_paged.__name__}.launch.MOST_MERGED_AT_ONCE", at_once)
    x = ragged((9, 0, 1, 4), (20, 8, 17, 4))
    x |= dict(query_start_loc=jnp.minimum(x["query_start_loc"] + 2, len(x["q"])), num_seqs=jnp.asarray([count]))
    check_call("ragged_page_attention", x)


@pytest.mark.parametrize(
    "pages, dtype, scale",
    [
        ("int8", "bfloat16", (20, 8, 2)),
        ("float8_e4m3fn", "float16", (2,)),
        *(
            pytest.param(*of, marks=pytest.mark.slow)
            for of in (("float8_e4m3fn", "bfloat16", (20, 8, 2)), ("int8", "float16", ()), ("int8", "bfloat16", None))
        ),
    ],
)
def test_pairs_of_eight_bits(pages, dtype, scale):
    """Also for a tiny and for a huge query, and with factors of very different magnitudes."""
    x, rng = decode_step(h=4, d=32, e=64, dtype=dtype, pages=pages), np.random.default_rng(1)
    x["q"] *= jnp.asarray([1, 2.0**-12, 2.0**-3, 100, 0, 1], dtype)[:, None, None]
    if scale is not None:
        factors = lambda: jnp.asarray(10.0 ** rng.uniform(-4, 0, scale), jnp.float32)
        x |= dict(k_scale=factors() / 10, v_scale=factors())
    operands, spec = operands_of("page_attention", x)
    found, _ = computed("page_attention", operands, spec)
    wanted = decode_defined(x)
    for n, (of_sequence, o) in enumerate(zip(wide(found[0][0]), wanted[0], strict=True)):
        assert np.abs(of_sequence - o).max() <= (8e-3 if dtype == "bfloat16" else 2e-3) * np.abs(o).max(initial=0), n
    close(found[1][0], wanted[1], 1e-5)


@pytest.mark.parametrize("values, factor", [(1e4, 1e-7), (1e-4, 1e5)], ids=("small", "large"))
def test_factors_of_values_that_float16_does_not_hold(values, factor):
    """A weight times the factor is less than the smallest number of float16, or more than the largest."""
    x, rng = decode_step(h=4, d=32, e=64, dtype="float16", pages="float16"), np.random.default_rng(1)
    x["v_pages"] = (x["v_pages"] * values).astype(jnp.float16)
    x["v_scale"] = jnp.asarray(factor * rng.uniform(1, 2, (20, 8, 2)), jnp.float32)
    found, _ = computed("page_attention", *operands_of("page_attention", x))
    wanted = decode_defined(x)[0]
    assert np.abs(wide(found[0][0]) - wanted).max() <= 2e-3 * np.abs(wanted).max()


@pytest.mark.slow
def test_many_heads_share_a_key():
    check_call("ragged_page_attention", ragged((9, 2), (20, 30), h=6, g=2))


@pytest.mark.parametrize("workers", (7, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 40))))
@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), dict(window=9)], ids=str)
def test_a_plan_divides_a_decode(workers, options):
    x = decode_step()
    of = dict(page_size=x["k_pages"].shape[1], workers=workers, **options)
    check_call("page_attention", x, ejkernel.lax.page_plan(x["context_lens"], **of), **options)


@pytest.mark.parametrize("h", (71, pytest.param(128, marks=pytest.mark.slow)))
def test_many_heads_whose_keys_do_not_begin_with_a_tile(h):
    """A tile of more than 64 rows masks no key that all of them see."""
    x, rng = decode_step(h=h, g=1, dtype="float16", pages="float16"), np.random.default_rng(0)
    plan = ejkernel.lax.page_plan(x["context_lens"], page_size=8, workers=7)
    assert_close(*computed("page_attention", *operands_of("page_attention", x, plan[None])), 2e-3)
    x = {name: jnp.asarray(rng.standard_normal((3, 64, 1, 16)), jnp.float16) for name in "kv"}
    x |= dict(q=jnp.asarray(rng.standard_normal((3, h, 16)), jnp.float16), sequence_start=jnp.asarray([5, 0, 20]))
    x |= dict(sequence_end=jnp.asarray([60, 64, 33]))
    assert_close(*computed("ragged_decode_attention", *operands_of("ragged_decode_attention", x)), 2e-3)


@pytest.mark.parametrize(
    "options", ({}, dict(causal=True), dict(window=(9, None), softcap=2.0, batch_invariant=True)), ids=str
)
def test_one_query_of_many_heads(options):
    """Of flash_attention, whose tile of several queries has fewer rows."""
    rng, spec = np.random.default_rng(0), FlashAttentionSpec(softmax_scale=0.2, **options)
    x = [jnp.asarray(rng.standard_normal((2, n, h, 16)), jnp.float16) for n, h in ((1, 71), (53, 1), (53, 1))]
    for queries, wrong in ((1, None), (2, "142 queries × heads of a group")):
        of = flash_decoding.supports(spec, Operands(jnp.zeros((2, queries, 71, 16), jnp.float16), *x[1:]), gpu_target())
        assert of == wrong or wrong in of
    found = flash_decoding.flash_attention(*x, spec=spec, config=KernelConfig(block_k=16, num_warps=4, num_stages=2))
    assert_close(found, kernel_registry.find("flash_attention", "xla").implementation(*x, spec=spec), 2e-3)


@pytest.mark.parametrize("workers", (3, pytest.param(40, marks=pytest.mark.slow)))
@pytest.mark.parametrize("tokens_per_item", (pytest.param(1, marks=pytest.mark.slow), 4))
def test_a_plan_divides_a_step(workers, tokens_per_item):
    x = ragged((1, 3, 9, 1, 4), (33, 17, 30, 40, 4))
    plan = ejkernel.lax.page_plan(
        x["context_lens"], x["query_start_loc"], page_size=8, num_tokens=len(x["q"]), workers=workers,
        tokens_per_item=tokens_per_item,
    )  # fmt: skip
    check_call("ragged_page_attention", x, plan)


@pytest.mark.parametrize(
    "splits, at_once",
    [(3, 3), pytest.param(3, 2, marks=pytest.mark.slow), pytest.param(17, 17, marks=pytest.mark.slow)],
)
def test_splits_are_merged_by_the_last_program_of_a_row_or_by_others(splits, at_once, monkeypatch):
    monkeypatch.setattr(f"{_paged.__name__}.launch.MOST_MERGED_AT_ONCE", at_once)
    grids = []
    launch = lambda *x, grid, **options: (grids.append(grid), interpreter.launch(*x, grid=grid, **options))[1]
    monkeypatch.setattr(_launch, "launch", launch)
    x, spec = operands_of("page_attention", decode_step(h=4))
    assert_close(*computed("page_attention", x, spec, num_splits=splits), 2e-6)
    programs = x.q.shape[1] * x.k_pages.shape[3] * splits
    assert grids == [programs] if splits <= at_once else [programs, x.q.shape[1] * x.q.shape[2]]


@pytest.mark.parametrize("planned", (False, True))
def test_whichever_program_is_the_last_merges_the_splits_in_their_order(planned, monkeypatch):
    x = decode_step(h=4)
    plan = ejkernel.lax.page_plan(x["context_lens"], page_size=8, workers=7)[None] if planned else None
    operands, spec = operands_of("page_attention", x, plan)
    found = []
    for order in (range, lambda n: range(n)[::-1], np.random.default_rng(0).permutation):
        monkeypatch.setattr(interpreter, "in_order", order)
        found.append(computed("page_attention", operands, spec)[0])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_invisible_keys_may_be_nan():
    """Slots after a context, before a window, and of pages that no table names."""
    x = ragged((5, 1, 3), (20, 13, 3))
    page, (n, columns) = x["kv_pages"].shape[1], x["block_tables"].shape
    x["block_tables"] = jnp.arange(n * columns).reshape(n, columns)
    used = np.arange(columns * page) < np.asarray(x["context_lens"])[:, None]
    used = used.reshape(n * columns, page, 1, 1)
    run = partial(
        OPERATIONS["ragged_page_attention"].prepare_arguments, **{n: a for n, a in x.items() if n != "kv_pages"}
    )
    results = []
    for pages in (x["kv_pages"], jnp.where(used, x["kv_pages"], jnp.nan)):
        call = run(kv_pages=pages)
        operands = OPERATIONS["ragged_page_attention"].algorithm.operands(**call.named)
        results.append(computed("ragged_page_attention", operands, call.spec)[0])
    for clean, poisoned in zip(*results, strict=True):
        np.testing.assert_array_equal(clean, poisoned)
