"""For any composition of steps, the text is that of full forward passes, and every page is freed."""

import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import lax
from ejkernel.serving import Engine, Limits, Sampling, logits_of_text, program, random_weights
from ejkernel.serving.drafts import Drafts, Lookup
from ejkernel.serving.model import hidden_states, logits_of
from ejkernel.serving.sampling import Kind
from tests.serving.engines import LIMITS, all_is_free

WAYS = {
    "chunked prefill beside decode": {},
    "one at a time": dict(sequences=1, buckets=(64,)),
    "preemption": dict(pages=8),
    "drafts": dict(drafts=3),
    "drafts and preemption": dict(pages=8, drafts=3),
    "odd sizes": dict(page_size=24, sequences=3, buckets=(5, 11), pages=7),
}


@pytest.mark.parametrize(
    "limits",
    [pytest.param(way, id=name, marks=[pytest.mark.core] * (name == "preemption")) for name, way in WAYS.items()],
)
def test_greedy_text_is_that_without_a_cache(engine, limits, prompts, expected):
    e = engine(**limits)
    before = e.scheduler.preemptions
    assert e.generate(prompts, Sampling(max_tokens=12)) == expected
    assert all_is_free(e) and set(e.traces.values()) == {1}
    assert (e.scheduler.preemptions > before) == (limits.get("pages") == 8)


def test_a_program_for_every_bucket_is_compiled_once_and_beforehand(engine, prompts):
    e = engine()
    e.compile()
    compiled = {8: 1, 16: 1} | {(kind, 4): 1 for kind in (Kind.DRAWN, Kind.RESTRICTED)}
    assert e.traces == compiled
    for count in range(1, len(prompts)):
        e.generate(prompts[:count], Sampling(max_tokens=count, temperature=count % 2))
    assert e.traces == compiled


def test_programs_are_traced_by_the_thread_that_steps(engine, prompts, expected, monkeypatch):
    """It may be in contexts, as of a policy override, which belong to it; another thread launches the programs."""
    threads, traced = [], program.forward
    monkeypatch.setattr(
        "ejkernel.serving.engine.forward", lambda *x: threads.append(threading.current_thread()) or traced(*x)
    )
    e = engine(pages=62)  # of no other test
    assert e.generate(prompts[:2], Sampling(max_tokens=12)) == expected[:2]
    assert set(threads) == {threading.current_thread()}


def test_pages_of_a_common_prefix_are_computed_once_and_shared(engine, plain):
    rng = np.random.default_rng(1)
    prefix = rng.integers(0, 64, 24).tolist()
    prompts = [[*prefix, *rng.integers(0, 64, n).tolist()] for n in (5, 1, 9, 3)]
    e = engine(buckets=(64,))
    requests = [e.submit(prompt, Sampling(max_tokens=6)) for prompt in prompts]
    done = e.step()  # reads nothing yet
    assert done is None and requests[0].pages[:3] == requests[3].pages[:3]
    assert [e.scheduler.pool.references[page] for page in requests[0].pages[:4]] == [4, 4, 4, 1]
    computed = len(prompts[0]) + sum(len(prompt) - 24 for prompt in prompts[1:])
    assert sum(request.computed for request in requests) == computed + 3 * 24
    for _ in e.run():
        pass
    assert [r.tokens[len(r.prompt) :] for r in requests] == [plain(prompt, 6) for prompt in prompts]
    assert all_is_free(e)

    again = e.submit(prompts[2], Sampling(max_tokens=6))  # its pages are free, but their contents still known
    e.step()
    assert again.computed == len(prompts[2]) and again.shared == 4
    assert e._issued[-1].chunks[0].start == 32
    assert [event.tokens for event in e.run()] == [[token] for token in plain(prompts[2], 6)]


def test_of_a_fully_cached_prompt_the_last_token_is_computed(engine, plain):
    e, prompt = engine(), list(range(16))
    assert e.generate([prompt, prompt, prompt], Sampling(max_tokens=3)) == [plain(prompt, 3)] * 3


def test_drafts_that_are_right_save_steps(engine, plain):
    """A text that repeats itself; accepted tokens are those that would have been generated anyway."""
    prompt = [5, 9, 33, 7] * 4
    alone, drafting = engine(sequences=1, buckets=(64,)), engine(drafts=3)
    steps = []
    for e in (alone, drafting):
        request = e.submit(prompt, Sampling(max_tokens=40))
        steps.append(0)
        while not e.idle:
            steps[-1] += e.step() is not None
        assert request.tokens[16:] == plain(prompt, 40) and all_is_free(e)
    assert steps[1] < steps[0]


@pytest.fixture(scope="module")
def unwindowed(decoder):
    """A decoder without windows, its weights, and (prompt, count) → its continuation without a cache."""
    whole = replace(decoder, windows=(None, None))
    weights = random_weights(whole, jax.random.key(3))
    of_text = jax.jit(lambda tokens: logits_of_text(whole, weights, tokens))

    def continuation(prompt, count):
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(prompt)] = prompt
        for at in range(len(prompt), len(prompt) + count):
            tokens[0, at] = jnp.argmax(of_text(tokens)[0, at - 1])
        return tokens[0, len(prompt) : len(prompt) + count].tolist()

    return whole, weights, continuation


@pytest.mark.parametrize(
    "limits",
    [{}, *(pytest.param(limit, marks=pytest.mark.slow) for limit in (dict(pages=7), dict(cache_dtype="int8")))],
    ids=["plain", "preemption", "int8"],
)
def test_text_of_draft_trees_is_that_without_a_cache(unwindowed, prompts, limits, monkeypatch):
    """Trees in which the right tokens are on the first path, on another, or on both alternately."""
    (decoder, weights, plain), rng, count, prompts = unwindowed, np.random.default_rng(0), 20, prompts[:5]
    if "cache_dtype" in limits:  # with its own continuation
        alone = Engine(decoder, weights, Limits(**{**LIMITS, **limits}))
        wanted = alone.generate(prompts, Sampling(max_tokens=count))
    else:
        wanted = [plain(prompt, count) for prompt in prompts]
    texts = [prompt + text for prompt, text in zip(prompts, wanted, strict=True)]

    def propose(self, tokens, count, branches):
        (text,) = (text for text in texts if text[: len(tokens)] == tokens)
        tree, node = Drafts([], []), -1
        for token in text[len(tokens) :][: rng.integers(5)]:
            for proposed in [(token + 1) % 64, token] if rng.random() < 0.4 else [token, (token + 1) % 64]:
                tree.tokens.append(proposed)
                tree.parents.append(node)
            node = len(tree.tokens) - 2 + (tree.tokens[-1] == token)
        return tree.first(count)

    monkeypatch.setattr(Lookup, "propose", propose)
    e = Engine(decoder, weights, Limits(**{**LIMITS, "drafts": 6, "branches": 2, **limits}))
    requests, done = [e.submit(prompt, Sampling(max_tokens=count)) for prompt in prompts], []
    while not e.idle:
        done.append(e.step())
    assert [request.tokens for request in requests] == texts and all_is_free(e)
    assert (e.scheduler.preemptions > 0) == ("pages" in limits)
    assert sum(len(event.tokens) - 1 for step in done if step for event in step.events) > 30  # accepted


def test_a_chain_of_drafts_beside_a_tree_sees_itself(unwindowed, monkeypatch):
    """A draft after a chain of others, in a step that has a tree of another text."""
    decoder, weights, plain = unwindowed
    prompts, count = ([3, 1, 4, 1, 5], [2, 7, 1]), 12
    wanted = [plain(prompt, count) for prompt in prompts]
    chain, tree = (prompt + text for prompt, text in zip(prompts, wanted, strict=True))

    def propose(self, tokens, count, branches):
        if tokens == chain[: len(tokens)]:
            right = chain[len(tokens) :][:3]
            return Drafts(right, list(range(-1, len(right) - 1)))
        right = tree[len(tokens) :][:1]
        return Drafts(right + [(token + 1) % 64 for token in right], [-1, -1][: 2 * len(right)])

    monkeypatch.setattr(Lookup, "propose", propose)
    e = Engine(decoder, weights, Limits(**LIMITS, drafts=4, branches=2))
    requests = [e.submit(prompt, Sampling(max_tokens=count)) for prompt in prompts]
    accepted = 0
    while not e.idle:
        done = e.step()
        accepted += sum(len(event.tokens) - 1 for event in done.events if event.request is requests[0])
    assert [request.tokens for request in requests] == [chain, tree]
    assert accepted == 8  # all drafts: 3 in each of two steps, then the 2 before the end


@pytest.mark.slow
def test_programs_of_trees_are_compiled_beforehand_too(unwindowed):
    e = Engine(*unwindowed[:2], Limits(**LIMITS, drafts=4, branches=2))
    e.compile()
    compiled = dict(e.traces)
    assert {("trees", 8), ("trees", 16)} < set(compiled)
    prompt = [5, 9, 33, 7, 5, 9, 2, 5, 9, 40, 5, 9] * 3
    assert e.generate([prompt], Sampling(max_tokens=20)) == [unwindowed[2](prompt, 20)]
    assert e.traces == compiled


def test_trees_ask_for_a_decoder_without_windows(decoder, weights):
    with pytest.raises(ValueError, match="branches is 2 but a layer of the decoder has a window"):
        Engine(decoder, weights, Limits(**LIMITS, drafts=4, branches=2))


def test_a_text_ends_after_an_end_token(engine, prompts, expected):
    e, end = engine(), expected[2][4]
    request = e.submit(prompts[2], Sampling(max_tokens=12, end=(end,)))
    *_, last = e.run()
    stop = expected[2].index(end) + 1
    assert request.tokens[17:] == expected[2][:stop] and last.finish_reason == request.finish_reason == "stop"
    assert all_is_free(e)


@pytest.mark.parametrize("drafts", [0, 3])
def test_cancelled_requests_free_their_pages_and_leave_others_alone(engine, prompts, expected, drafts):
    e = engine(drafts=drafts)
    requests = [e.submit(prompt, Sampling(max_tokens=12)) for prompt in prompts]
    e.cancel(requests[5])  # waits
    for _ in range(4):
        e.step()
    e.cancel(requests[0])  # runs
    e.cancel(requests[0])
    for event in e.run():
        assert event.request not in (requests[0], requests[5])
    kept = [i for i in range(len(prompts)) if i not in (0, 5)]
    assert [requests[i].tokens[len(prompts[i]) :] for i in kept] == [expected[i] for i in kept]
    assert requests[0].finish_reason == requests[5].finish_reason == "cancelled" and all_is_free(e)


def test_a_request_that_can_never_fit_is_refused(engine):
    e = engine(pages=4)
    for prompt, max_tokens, message in (
        ([], 1, "the prompt has no tokens"),
        ([64], 1, "not below 64, the vocabulary"),
        ([1] * 60, 5, "the prompt has 60 tokens and max_tokens is 5; together they may be 64"),
        ([1] * 30, 3, "the prompt has 30 tokens and max_tokens is 3; all pages together hold 32"),
    ):
        with pytest.raises(ValueError, match=message):
            e.submit(prompt, Sampling(max_tokens=max_tokens))
    assert e.idle


@pytest.mark.parametrize(
    "limits, message",
    [
        (dict(pages=0), "pages is 0; it must be at least 1"),
        (dict(buckets=(16, 8)), "buckets is (16, 8); it must be ascending"),
        (dict(sequences=17), "sequences is 17 but the largest bucket 16"),
        (dict(drafts=-1), "drafts is -1"),
        (dict(branches=0), "branches is 0"),
        (dict(branches=3, drafts=2), "branches is 3 and drafts 2; a tree has a token for each branch"),
        (dict(branches=2, drafts=32), "at most 31"),
        (dict(cache_dtype=jnp.bfloat16), "cache_dtype is bfloat16; it must be that of the weights, float32, or"),
    ],
)
def test_limits_that_cannot_be_are_refused(engine, limits, message):
    with pytest.raises(ValueError) as raised:
        engine(**limits)
    assert message in str(raised.value)


# --- What is drawn ----------------------------------------------------------------------------------------------------

HOT = dict(max_tokens=12, temperature=0.9, top_k=20, top_p=0.95)


def test_samples_depend_on_the_seed_and_not_on_other_requests(engine, prompts):
    alone = [
        engine(sequences=1, buckets=(64,)).generate([p], Sampling(**HOT, seed=i))[0] for i, p in enumerate(prompts[:3])
    ]
    for limits in (dict(), dict(drafts=3), dict(pages=9)):
        e = engine(**limits)
        requests = [e.submit(prompt, Sampling(**HOT, seed=i)) for i, prompt in enumerate(prompts)]
        for _ in e.run():
            pass
        assert [r.tokens[len(r.prompt) :] for r in requests[:3]] == alone
    assert alone[0] != engine().generate(prompts[:1], Sampling(**HOT, seed=7))[0]


# --- Where the cache is -----------------------------------------------------------------------------------------------


def test_the_pool_is_written_in_place(engine, prompts):
    e = engine()
    before = [e._last, *(cache.pages for cache in e._caches)]
    e.generate(prompts[:1])
    assert all(array.is_deleted() for array in before)


@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
def test_a_quantised_cache_holds_rounded_keys_and_values(decoder, weights, engine, plain, prompts, dtype):
    """The text is that of full passes whose keys and values are rounded likewise."""

    def rounded(x):
        if dtype != "int8":
            return x.astype(dtype).astype(x.dtype)
        scale = jnp.abs(x).max(-1, keepdims=True) / 127
        return jnp.round(x / scale) * scale

    def attend(q, k, v, window, cache):
        return lax.flash_attention(q, rounded(k), rounded(v), causal=True, window=window, softcap=30.0), cache

    @jax.jit
    def of_text(tokens):
        return logits_of(weights, hidden_states(decoder, weights, tokens, jnp.arange(64), attend, [None] * 2)[0])

    e = engine(cache_dtype=dtype)
    assert e.generate(prompts, Sampling(max_tokens=12)) == [plain(prompt, 12, of_text) for prompt in prompts]
    assert all_is_free(e) and {cache.pages.dtype.name for cache in e._caches} == {dtype}
