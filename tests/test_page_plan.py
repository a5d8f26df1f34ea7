"""A plan covers every key of every token once, by items no larger than their share, for any lengths."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel import lax
from ejkernel.kernels._page_plan import WorkItem

from .kernels.paged import attended, close, keys_of

pytestmark = pytest.mark.usefixtures("strict")

PAGE, CONTEXTS, LENGTHS = (
    8,
    (17, 400, 1, 0, 33, 3, 150),
    (9, 1, 1, 0, 33, 5, 40),
)  # the sixth is shorter than its new tokens
STARTS, TOKENS = np.cumsum([0, *LENGTHS]), 100
OPTIONS = [
    dict(),
    dict(window=20),
    dict(workers=1),
    dict(workers=7),
    dict(workers=1000),
    dict(window=(9, None), workers=40),
]
RAGGED = [dict(), dict(tokens_per_item=1), dict(tokens_per_item=200), dict(num_seqs=3), dict(drafts=4), dict(drafts=64)]


def items(plan):
    """The non-empty items of a plan, as rows of NumPy."""
    found = [WorkItem(*map(int, item)) for item in np.asarray(plan).reshape(-1, 8)]
    return [item for item in found if item.tokens]


def wanted(options, ragged):
    """For every token: its request, its index among all tokens, and the range of keys that it sees."""
    window = options.get("window", 10**9)
    left = window - 1 if isinstance(window, int) else window[0]
    count = options.get("num_seqs", len(CONTEXTS))
    for n, (context, length) in enumerate(
        zip(CONTEXTS[:count], LENGTHS if ragged else (1,) * len(CONTEXTS), strict=False)
    ):
        for i in range(length):
            position = context - length + i
            stop = position + 1 if "drafts" not in options else context - length + min(length, options["drafts"])
            yield n, (STARTS[n] + i if ragged else n), range(max(0, position - left), max(stop, 0))


def plan_of(options, ragged):
    """The plan, made once for all its tests."""
    return made_once(tuple(options.items()), ragged)


@cache
def made_once(options, ragged):
    more = dict(query_start_loc=STARTS, num_tokens=TOKENS) if ragged else {}
    return jax.jit(lambda *x: lax.page_plan(*x, page_size=PAGE, **more, **dict(options)))(np.array(CONTEXTS))


CASES = [(options, False) for options in OPTIONS] + [(a | b, True) for a in OPTIONS for b in RAGGED]


@pytest.mark.parametrize("options, ragged", CASES, ids=str)
def test_every_key_once(options, ragged):
    found = items(plan_of(options, ragged))
    for n, token, keys in wanted(options, ragged):
        of_token = [item for item in found if item.token <= token < item.token + item.tokens]
        assert {item.request for item in of_token} == {n}
        pages = [page for item in of_token for page in range(item.page, item.page + item.pages)]
        assert len(pages) == len(set(pages)) and {key // PAGE for key in keys} <= set(pages)
    tokens = {token for _, token, _ in wanted(options, ragged)}
    assert tokens == {item.token + i for item in found for i in range(item.tokens)}


@pytest.mark.parametrize("options, ragged", CASES, ids=str)
def test_no_item_has_more_than_its_share(options, ragged):
    plan = plan_of(options, ragged)
    found, workers = items(plan), options.get("workers", 128)
    pages = [item.pages for item in found]
    assert max(pages) <= max(1, -(-sum(pages) // workers))
    assert pages == sorted(pages, reverse=True)
    rows = len(CONTEXTS) + (TOKENS // options.get("tokens_per_item", 16) if ragged else 0)
    assert plan.shape == (rows, 1 + -(-workers // rows), 8) and plan.dtype == jnp.int32
    assert len(found) == np.count_nonzero(np.asarray(plan).any(-1)) <= rows + workers


@pytest.mark.parametrize("options, ragged", CASES, ids=str)
def test_slots(options, ragged):
    """Parts of a row have consecutive slots; unsplit items have none."""
    plan = plan_of(options, ragged)
    by_token = {}
    for item in items(plan):
        by_token.setdefault(item.token, []).append(item)
    slots = []
    for parts in by_token.values():
        parts.sort(key=lambda item: item.split)
        assert [item.split for item in parts] == list(range(len(parts))) and {x.splits for x in parts} == {len(parts)}
        assert max(x.pages for x in parts) - min(x.pages for x in parts) <= 1
        first = parts[0].slot
        assert [item.slot for item in parts] == ([-1] if len(parts) == 1 else [first + n for n in range(len(parts))])
        slots += [item.slot for item in parts if item.slot >= 0]
    assert sorted(slots) == list(range(len(slots))) and len(slots) <= 2 * plan.shape[0] * (plan.shape[1] - 1)


def step():
    rng, columns = np.random.default_rng(0), 50
    return dict(
        q=jnp.asarray(rng.standard_normal((len(CONTEXTS), 4, 16)), jnp.float32),
        k_pages=jnp.asarray(rng.standard_normal((60, PAGE, 2, 16)), jnp.float32),
        v_pages=jnp.asarray(rng.standard_normal((60, PAGE, 2, 16)), jnp.float32),
        context_lens=jnp.array(CONTEXTS),
        block_tables=jnp.asarray(rng.integers(0, 60, (len(CONTEXTS), columns)), jnp.int32),
    )


def test_items_that_are_merged_are_the_operation():
    """In NumPy, item after item, as a kernel follows a plan."""
    x = step()
    plan = lax.page_plan(x["context_lens"], page_size=PAGE, window=100, workers=16)
    o, lse = np.zeros((len(CONTEXTS), 4, 16)), np.full((len(CONTEXTS), 4), -np.inf)
    for item in items(plan):
        n = item.request
        k, v = (keys_of(x[name], None, x["block_tables"][n]) for name in ("k_pages", "v_pages"))
        j = np.arange(len(k))
        seen = (item.page * PAGE <= j) & (j < (item.page + item.pages) * PAGE)
        seen &= (j < CONTEXTS[n]) & (j >= CONTEXTS[n] - 100)
        part, of_part = attended(np.asarray(x["q"][n]), k, v, seen)
        both = np.logaddexp(lse[n], of_part)
        weigh = lambda of, both=both: np.exp(of - np.where(np.isfinite(both), both, 0))[:, None]
        o[n], lse[n] = weigh(lse[n]) * o[n] + weigh(of_part) * part, both
    for found, exact in zip(lax.page_attention(**x, window=100, return_lse=True), (o, lse), strict=True):
        close(found, exact)


def test_results_are_the_same_with_and_without_it():
    x = step()
    for window in (None, 20):
        plan = lax.page_plan(x["context_lens"], page_size=PAGE, window=window)
        attend = jax.jit(partial(lax.page_attention, window=window))
        np.testing.assert_array_equal(attend(**x, plan=plan), attend(**x))
    pages = jnp.stack([x["k_pages"], x["v_pages"]], axis=3).reshape(60, PAGE, 4, 16)
    tables = dict(context_lens=x["context_lens"], query_start_loc=jnp.asarray(STARTS, jnp.int32))
    q = jnp.asarray(np.random.default_rng(1).standard_normal((TOKENS, 4, 16)), jnp.float32)
    plan = lax.page_plan(**tables, page_size=PAGE, num_tokens=TOKENS)
    attend = partial(lax.ragged_page_attention, q, pages, **tables, block_tables=x["block_tables"], num_seqs=7)
    np.testing.assert_array_equal(attend(plan=plan), attend())


def test_lengths_can_be_traced():
    """One program for all lengths, and for several steps at once."""
    traced = []

    @jax.jit
    def made(lengths, starts, count):
        traced.append(1)
        return lax.page_plan(lengths, starts, count, page_size=PAGE, num_tokens=TOKENS)

    for count in range(1, 8):
        found = made(jnp.array(CONTEXTS), jnp.asarray(STARTS), jnp.array([count]))
        np.testing.assert_array_equal(found, plan_of(dict(num_seqs=count), True))
    assert len(traced) == 1
    lengths = jnp.stack([jnp.array(CONTEXTS), jnp.array(CONTEXTS[::-1])])
    mapped = jax.vmap(partial(lax.page_plan, page_size=PAGE))(lengths)
    for one, of_lengths in zip(mapped, lengths, strict=True):
        np.testing.assert_array_equal(one, lax.page_plan(of_lengths, page_size=PAGE))


@pytest.mark.parametrize("types", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))
def test_sequences_that_are_split_have_a_plan_of_them_all(types):
    """A plan of the whole sequences does not describe one device's part of them, and is ignored."""
    x = {name: jnp.concatenate([a, a[:1]]) if name[0] in "qcb" else a for name, a in step().items()}
    plan, wanted = lax.page_plan(x["context_lens"], page_size=PAGE), lax.page_attention(**x)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(types,) * 2)
    specs = dict(q=P("x", "y"), k_pages=P(None, None, "y"), v_pages=P(None, None, "y"), context_lens=P("x"))
    specs |= dict(block_tables=P("x"), plan=P())
    placed = {n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in (x | dict(plan=plan)).items()}
    close(jax.jit(lax.page_attention)(**placed), wanted)


def test_a_plan_of_lengths_that_are_split():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    split = lambda x: jax.device_put(np.asarray(x, np.int32), NamedSharding(mesh, P("x")))
    ragged = dict(query_start_loc=split(range(4)), num_tokens=4)
    for given, name in ((dict(context_lens=split([5, 9])), "context_lens"), (ragged, "query_start_loc")):
        with pytest.raises(ValueError, match=f"page_plan: axis 0 of {name} is sharded over 'x'; it must be whole"):
            lax.page_plan(**dict(context_lens=np.array([5, 9, 7]), page_size=PAGE) | given)


WRONG = {
    "rank": (dict(context_lens=np.zeros((2, 2), int)), ValueError, "context_lens has 2 axes; it must have 1"),
    "floats": (dict(context_lens=np.zeros(2, np.float32)), TypeError, "context_lens has dtype float32; it must be an"),
    "no sequence": (dict(context_lens=np.zeros(0, np.int32)), ValueError, "context_lens has 0 sequences; there must"),
    "no page": (dict(page_size=0), ValueError, "page_size is 0; it must be at least 1"),
    "page beyond int32": (dict(page_size=2**31), ValueError, "page_size is 2147483648; it must be a positive int of"),
    "workers beyond int32": (dict(workers=10**40), ValueError, "workers is 1000"),
    "pages": (dict(page_size=np.array([8, 8])), TypeError, "page_size must be an int or None, not ndarray"),
    "any page": (dict(page_size=None), ValueError, "page_size must be given"),
    "workers": (dict(workers=1.5), TypeError, "workers must be an int or None, not float"),
    "tokens alone": (dict(num_tokens=7), ValueError, "num_tokens is given without query_start_loc"),
    "starts alone": (dict(query_start_loc=np.arange(8)), ValueError, "num_tokens must be given with query_start_loc"),
    "starts": (dict(query_start_loc=np.arange(9), num_tokens=9), ValueError, "query_start_loc must have 8 entries"),
    "too many": (dict(query_start_loc=np.arange(8), num_tokens=9, num_seqs=8), ValueError, "num_seqs is 8; there are"),
    "window": (dict(window=0), ValueError, "window is 0; a number of keys must be at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("changes, error, says", WRONG.values(), ids=WRONG)
def test_errors_name_the_argument(changes, error, says):
    with pytest.raises(error) as raised:
        lax.page_plan(**dict(context_lens=np.array(CONTEXTS), page_size=PAGE) | changes)
    assert type(raised.value) is error and str(raised.value).startswith(f"page_plan: {says}"), raised.value
