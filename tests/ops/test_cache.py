"""ConfigCache and its contexts: which changes retrace a jitted program, and threads."""

import threading

import jax
import pytest
from shown import HEURISTIC, OTHER, TUNED, Config, Shown, executor, key_of, ones, ran

from ejkernel.ops import ConfigCache, overlay_cache, policy_override


@pytest.fixture
def traced():
    """A jitted call of a kernel, and how often it was traced."""
    kernel, cache, traces = Shown(), ConfigCache(), []
    run = executor(cache)

    @jax.jit
    def step(a):
        traces.append(a)
        return run(kernel, a)

    return step, traces, cache, key_of(kernel, ones())


def test_a_config_put_after_the_first_call_is_used_by_the_second(traced):
    step, traces, cache, key = traced
    assert ran(step(ones())) == HEURISTIC
    cache.put(key, TUNED)
    assert ran(step(ones())) == TUNED and len(traces) == 2
    cache.put(key, OTHER)
    assert ran(step(ones())) == OTHER and len(traces) == 3


def test_unchanged_configs_do_not_retrace(traced):
    step, traces, cache, key = traced
    cache.put(key, TUNED)
    step(ones())
    cache.put(key, TUNED)
    cache.put("the key of something that was never asked for", OTHER)
    assert ran(step(ones())) == TUNED and len(traces) == 1


def test_measuring_during_the_first_trace_does_not_retrace():
    traces, run, kernel = [], executor(autotune=True), Shown()

    @jax.jit
    def step(a):
        traces.append(a)
        return run(kernel, a)

    assert ran(step(ones())) == ran(step(ones())) == TUNED and len(traces) == 1


def test_a_config_put_into_an_active_overlay_is_used(traced):
    step, _, _, key = traced
    with overlay_cache(ConfigCache()) as overlay:
        assert ran(step(ones())) == HEURISTIC
        overlay.put(key, OTHER)
        assert ran(step(ones())) == OTHER
    assert ran(step(ones())) == HEURISTIC


def test_an_overlay_that_is_entered_again_is_traced_once(traced):
    step, traces, _, key = traced
    overlay = ConfigCache()
    overlay.put(key, OTHER)
    for _ in range(3):
        with overlay_cache(overlay):
            step(ones())
        step(ones())
    assert len(traces) == 2


def test_overlays_nest():
    kernel, run = Shown(), executor(autotune=False)
    inner, outer = ConfigCache(), ConfigCache()
    outer.put(key_of(kernel, ones()), OTHER)
    inner.put(key_of(kernel, ones(8)), TUNED)
    with overlay_cache(outer), overlay_cache(inner):
        assert (ran(run(kernel, ones())), ran(run(kernel, ones(8)))) == (OTHER, TUNED)
        inner.put(key_of(kernel, ones()), TUNED)
        assert ran(run(kernel, ones())) == TUNED
    assert ran(run(kernel, ones())) == HEURISTIC


def test_contexts_end_with_an_exception():
    kernel, overlay = Shown(), ConfigCache()
    overlay.put(key_of(kernel, ones()), OTHER)
    with pytest.raises(KeyError), overlay_cache(overlay), policy_override(autotune=True):
        raise KeyError
    assert ran(executor()(kernel, ones())) == HEURISTIC


def test_sixteen_threads_with_overlays_of_their_own(traced):
    step, _, _, key = traced
    found, together = {}, threading.Barrier(16)

    def work(i):
        overlay = ConfigCache()
        overlay.put(key, Config(i))
        together.wait()
        with overlay_cache(overlay):
            found[i] = {ran(step(ones())) for _ in range(20)}

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: {Config(i)} for i in range(1, 17)}


def test_generation_counts_puts():
    cache = ConfigCache()
    cache.put("a", TUNED), cache.put("b", TUNED), cache.put("a", OTHER)
    assert (cache.generation, len(cache)) == (3, 2)


def test_threads_share_a_cache():
    cache = ConfigCache()
    work = lambda i: [cache.put(f"{i} {j}", Config(j)) for j in range(200)]
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.generation == len(cache) == 1600
