"""The budget of a search: what is timed within it, what an interrupted search stores, and how the budget is set."""

import json
import threading

import jax
import pytest
from shown import HEURISTIC, executor, key_of, ones, ran

from ejkernel.ops import ConfigCache, Invocation, PersistentCache, Tuner
from ejkernel.ops.core import budget, progress
from ejkernel.ops.core.budget import BudgetSpent
from tests.ops.budgeted import SPACE, Several, measured, quick

# --- What is timed


@pytest.mark.parametrize("seconds, tried", [(600, 2), (1300, 3), (5000, 4), (float("inf"), 4)])
def test_candidates_are_timed_in_their_order_until_the_budget_is_spent(slow_timing, seconds, tried):
    found = measured(Several(), seconds)
    assert list(found.times) == SPACE[:tried] and (found.tried, found.candidates) == (tried, 4)
    assert found.fastest == SPACE[tried - 1] and found.cut_short == (tried < 4)


def test_a_fifth_of_the_budget_is_left_for_what_a_call_waits_for_beside_the_search(slow_timing):
    assert list(measured(Several(), 950).times) == SPACE[:2], "the third would begin after 800 s"


def test_with_time_for_only_the_heuristic_config_nothing_is_stored(slow_timing):
    with pytest.raises(BudgetSpent, match=r"several@v1: a budget of 300 s is too short to compare two configs"):
        measured(Several(), 300)


def test_a_candidate_not_compiled_within_the_budget_is_left_out(clock, steps, event):
    clock.blocked = [0, 0, 0, 0, 1]  # the waits for programs and, between them, for what is lowered
    steps.compiling = lambda config: config == SPACE[2] and event.wait()
    found = measured(Several(), 600)
    assert set(found.times) == set(SPACE[:2]) and found.cut_short


def test_the_next_candidate_is_compiled_while_one_is_timed(clock, steps, event, monkeypatch):
    steps.compiling = lambda config: config == SPACE[1] and event.wait()
    time = Tuner._time
    monkeypatch.setattr(Tuner, "_time", lambda *args: event.set() or time(*args))
    assert list(measured(Several(), 600).times) == SPACE


def test_without_the_heuristic_config_compiled_in_time_nothing_is_measured(clock, steps, event):
    clock.blocked = [1, 1]
    steps.compiling = lambda config: config == HEURISTIC and event.wait()
    with pytest.raises(BudgetSpent):
        measured(Several(), 3)


def test_without_operands_in_time_nothing_is_measured(event):
    class Slow(Several):
        def synthetic_inputs(self, inv):
            event.wait()

    with pytest.raises(BudgetSpent):
        measured(Slow(), 0.05)


def test_values_of_other_shapes_than_those_of_the_call_are_measured(steps):
    class Larger(Several):
        def synthetic_inputs(self, inv):
            return (ones(8, 8),), {}

    kernel = Larger()
    found = quick.measure(kernel, Invocation(kernel, (jax.ShapeDtypeStruct((4, 4), "float32"),), {}), budget=1e6)
    assert set(found.times) == set(SPACE)


def test_searches_without_result_are_logged_in_one_line(event, monkeypatch, capsys, recwarn):
    class Slow(Several):
        def synthetic_inputs(self, inv):
            event.wait()

    monkeypatch.setattr(progress, "_told", threading.Event())
    monkeypatch.setattr(progress, "QUIET_SECONDS", 600)
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_BUDGET_S", "0.05")
    cache, events = ConfigCache(), []
    run = executor(cache, autotune=True, on_event=lambda event, *_: events.append(event))
    for _ in range(2):
        assert ran(run(Slow(), ones())) == ran(run(Slow(), ones(2, 3))) == HEURISTIC
    assert events == ["autotune_start", "heuristics"] * 2 + ["heuristics"] * 2, "a call is tried once"
    assert not recwarn.list and len(cache) == 0
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("ejkernel: several@v1: a budget of 0.05 s is too short to compare two configs")


# --- What is kept


def test_a_search_without_result_is_not_repeated(slow_timing, monkeypatch, tmp_path, capsys):
    events = []

    def in_a_new_process(seconds):
        monkeypatch.setenv("EJKERNEL_AUTOTUNE_BUDGET_S", seconds)
        monkeypatch.setattr(progress, "_told", threading.Event())
        run = executor(
            persistent=PersistentCache(tmp_path), autotune=True, on_event=lambda event, *_: events.append(event)
        )
        config, told = ran(run(Several(), ones())), capsys.readouterr().err
        searched, _ = events == ["autotune_start", "heuristics"], events.clear()
        return config, searched, told.partition("choose ")[2].partition(" (")[0]

    assert in_a_new_process("300") == (HEURISTIC, True, "from now on")
    assert in_a_new_process("300") == in_a_new_process("200") == (HEURISTIC, False, "")
    assert in_a_new_process("600")[0] == SPACE[1], "a larger budget is another matter"


def entry(store, key):
    with open(store.path_of()) as file:
        return json.load(file)["configs"][key]


def test_an_interrupted_search_stores_its_best_and_marks_it(slow_timing, monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_BUDGET_S", "600")
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
