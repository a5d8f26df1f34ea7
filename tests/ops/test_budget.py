"""The budget of measuring: what is timed within it, what is kept of a search that it cut short, and how it is given."""

import concurrent.futures
import json
import threading

import pytest
from shown import HEURISTIC, Config, Shown, executor, key_of, ones, ran

from ejkernel.errors import EjkernelRuntimeError
from ejkernel.ops import ConfigCache, Invocation, PersistentCache, Tuner
from ejkernel.ops.core import budget, programs

SPACE = [HEURISTIC, *map(Config, (2, 3, 4))]
quick = Tuner(warmup=1, iters=1)


class Several(Shown):
    """Four candidates, of which some wait for an event when they are traced."""

    def __init__(self, blocked=(), event=None):
        super().__init__("several")
        self.blocked, self.event = blocked, event

    def config_space(self, inv):
        return SPACE

    def run(self, a, *, cfg):
        if cfg in self.blocked:
            self.event.wait()
        return super().run(a, cfg=cfg)


def measured(kernel, seconds):
    return quick.measure(kernel, Invocation(kernel, (ones(),), {}), budget=seconds)


@pytest.fixture
def event():
    found = threading.Event()
    yield found
    found.set()


@pytest.fixture
def slow_timing(monkeypatch):
    """A clock that only the timing of a candidate moves, by 400 s; the later a candidate comes the faster it is."""
    now, timed = [0.0], []
    monkeypatch.setattr(budget, "monotonic", lambda: now[0])

    def time(self, program, *_):
        timed.append(program)
        now[0] += 400
        return 1.0 / len(timed)

    monkeypatch.setattr(Tuner, "_time", time)
    monkeypatch.setattr(Tuner, "_in_turns", lambda *_: {})


@pytest.fixture
def all_but_the_blocked(monkeypatch):
    """Compilers have as much time as they need, those that wait for the event excepted."""

    def wait(futures, timeout):
        pending = set(futures)
        while len(pending) > 1:
            _, pending = concurrent.futures.wait(pending, 60, "FIRST_COMPLETED")

    monkeypatch.setattr(programs, "wait", wait)
    monkeypatch.setattr(programs.os, "cpu_count", lambda: 16)


# --- What is timed


@pytest.mark.parametrize("seconds, tried", [(1, 1), (500, 2), (1000, 3), (5000, 4), (float("inf"), 4)])
def test_candidates_are_timed_in_their_order_until_the_budget_is_spent(slow_timing, monkeypatch, seconds, tried):
    monkeypatch.setattr(programs, "wait", lambda futures, timeout: concurrent.futures.wait(futures))
    found = measured(Several(), seconds)
    assert list(found.times) == SPACE[:tried] and (found.tried, found.candidates) == (tried, 4)
    assert found.fastest == SPACE[tried - 1] and found.cut_short == (tried < 4)


def test_what_compiles_for_longer_is_not_waited_for(event, all_but_the_blocked):
    found = measured(Several(blocked=[SPACE[1]], event=event), 600)
    assert set(found.times) == {HEURISTIC, *SPACE[2:]} and found.cut_short


def test_where_the_heuristic_config_is_not_ready_in_time_nothing_is_measured(event):
    with pytest.raises(
        EjkernelRuntimeError, match=r"several@v1: nothing could be measured within the budget of 0\.05 s"
    ):
        measured(Several(blocked=SPACE, event=event), 0.05)


def test_so_it_is_where_values_to_measure_with_are_not(event):
    class Slow(Several):
        def synthetic_inputs(self, inv):
            self.event.wait()

    with pytest.raises(EjkernelRuntimeError, match="nothing could be measured"):
        measured(Slow(event=event), 0.05)


def test_a_call_that_nothing_could_be_measured_for_warns_once_and_uses_heuristics(event, monkeypatch):
    class Slow(Several):
        def synthetic_inputs(self, inv):
            self.event.wait()

    monkeypatch.setenv("EJKERNEL_AUTOTUNE_BUDGET_S", "0.05")
    cache = ConfigCache()
    run = executor(cache, autotune=True)
    with pytest.warns(UserWarning, match="the heuristic config is used") as warned:
        assert ran(run(Slow(event=event), ones())) == ran(run(Slow(event=event), ones())) == HEURISTIC
    assert len(warned) == 1 and len(cache) == 0


# --- What is kept


def entry(store, key):
    with open(store.path_of()) as file:
        return json.load(file)["configs"][key]


def test_the_best_of_those_that_were_timed_is_kept_and_says_so(slow_timing, monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "wait", lambda futures, timeout: concurrent.futures.wait(futures))
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_BUDGET_S", "500")
    store, kernel, events = PersistentCache(tmp_path), Several(), []
    key, note = key_of(kernel, ones()), lambda event, *_: events.append(event)
    run = executor(persistent=store, autotune=True, on_event=note)
    assert ran(run(kernel, ones())) == SPACE[1]
    assert entry(store, key)["tried"] == [2, 4]
    again = executor(persistent=store, autotune=True, on_event=note)
    assert ran(again(kernel, ones())) == SPACE[1]
    assert events == ["autotune_start", "autotune_finish", "persistent_hit"]
    assert again.selector.measure(kernel, Invocation(kernel, (ones(),), {})) == SPACE[3], "without a budget"
    assert "tried" not in entry(store, key) and store.get(key) == SPACE[3]


# --- How it is given


def test_the_default_is_three_seconds(monkeypatch):
    monkeypatch.delenv("EJKERNEL_AUTOTUNE_BUDGET_S")
    assert budget.budget_of_environment() == 3
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_BUDGET_S", "0.25")
    assert budget.budget_of_environment() == 0.25


@pytest.mark.parametrize("value", ["fast", "-1", "nan", "-inf", "3s"])
def test_a_value_that_is_no_number_of_seconds_is_an_error_of_the_call(monkeypatch, value):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_BUDGET_S", value)
    with pytest.raises(ValueError, match=f"EJKERNEL_AUTOTUNE_BUDGET_S is '{value}'; it has to be a number of seconds"):
        executor(autotune=True)(Several(), ones())
    assert ran(executor(autotune=False)(Several(), ones())) == HEURISTIC, "it is read when it is used"


def test_a_budget_of_zero_leaves_the_choice_to_heuristics(monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_BUDGET_S", "0")
    events, cache = [], ConfigCache()
    run = executor(cache, autotune=True, on_event=lambda event, *_: events.append(event))
    assert ran(run(Several(), ones())) == HEURISTIC and events == ["heuristics"] and len(cache) == 0
