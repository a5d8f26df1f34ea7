"""The budget of measuring: what is timed within it, what is kept of a search that it cut short, and how it is given."""

import concurrent.futures
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
import shown
from shown import HEURISTIC, Config, Shown, executor, key_of, ones, ran

from ejkernel.ops import ConfigCache, Invocation, PersistentCache, Tuner
from ejkernel.ops.core import budget, programs, progress, tuner
from ejkernel.ops.core.budget import BudgetSpent

SPACE = [HEURISTIC, *map(Config, (2, 3, 4))]
quick = Tuner(warmup=1, iters=1)


class Several(Shown):
    """Four candidates."""

    def __init__(self):
        super().__init__("several")

    def config_space(self, inv):
        return SPACE


class Clock:
    """Seconds that pass only where a test lets them, and where what it blocks is waited for.

    Attributes:
        blocked: how many of what is waited for a test blocks, the first time, the second, and so on.
    """

    def __init__(self):
        self.now, self.blocked = 0.0, []

    def __call__(self):
        return self.now

    def wait(self, futures, timeout=None, return_when="ALL_COMPLETED"):
        """As `concurrent.futures.wait`; what is blocked takes the whole time, all else takes none."""
        futures, blocked = set(futures), self.blocked.pop(0) if self.blocked else 0
        wanted = len(futures) - blocked
        if return_when == "FIRST_COMPLETED" and not blocked:
            wanted = min(1, len(futures))
        while len(concurrent.futures.wait(futures, 0).done) < wanted:
            pending = concurrent.futures.wait(futures, 0).not_done
            assert not pending or concurrent.futures.wait(pending, 60, "FIRST_COMPLETED").done
        self.now += timeout if blocked else 0
        return concurrent.futures.wait(futures, 0)


class Steps:
    """What making programs does beside what it does: `lowering` and `compiling` are called with each config."""

    def __init__(self):
        self.done, self.lowering, self.compiling = [], lambda config: None, lambda config: None

    def lowered(self, kernel, inv, config):
        self.lowering(config)
        program = programs.lowered(kernel, inv, config)
        self.done.append(("lowered", config))

        def compile():
            self.compiling(config)
            compiled = program.compile()
            self.done.append(("compiled", config))
            return compiled

        return SimpleNamespace(compile=compile)

    def of(self, step):
        return [config for name, config in self.done if name == step]


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(budget, "monotonic", found)
    monkeypatch.setattr(programs, "monotonic", found)
    monkeypatch.setattr(programs, "wait", found.wait)
    monkeypatch.setattr(programs.os, "cpu_count", lambda: 16)
    return found


@pytest.fixture
def steps(monkeypatch):
    found = Steps()
    monkeypatch.setattr(tuner, "lowered", found.lowered)
    return found


@pytest.fixture
def event():
    found = threading.Event()
    yield found
    found.set()


def measured(kernel, seconds):
    return quick.measure(kernel, Invocation(kernel, (ones(),), {}), budget=seconds)


@pytest.fixture
def slow_timing(clock, monkeypatch):
    """A candidate takes 400 s to time; the later it comes the faster it is."""
    timed = []

    def time(self, program, *_):
        timed.append(program)
        clock.now += 400
        return 1.0 / len(timed)

    monkeypatch.setattr(Tuner, "_time", time)
    monkeypatch.setattr(Tuner, "_interleaved", lambda *_: {})


# --- What is timed


@pytest.mark.parametrize("seconds, tried", [(500, 2), (1000, 3), (5000, 4), (float("inf"), 4)])
def test_candidates_are_timed_in_their_order_until_the_budget_is_spent(slow_timing, seconds, tried):
    found = measured(Several(), seconds)
    assert list(found.times) == SPACE[:tried] and (found.tried, found.candidates) == (tried, 4)
    assert found.fastest == SPACE[tried - 1] and found.cut_short == (tried < 4)


def test_where_there_is_time_for_the_heuristic_config_alone_nothing_is_learned(slow_timing):
    with pytest.raises(BudgetSpent, match=r"several@v1: a budget of 300 s is too short to compare two configs"):
        measured(Several(), 300)


def test_what_compiles_for_longer_is_not_waited_for(clock, steps, event):
    clock.blocked = [1, 0, 1]
    steps.compiling = lambda config: config == SPACE[1] and event.wait()
    found = measured(Several(), 600)
    assert set(found.times) == {HEURISTIC, *SPACE[2:]} and found.cut_short


def test_what_is_compiled_while_others_are_timed_is_timed_too(clock, steps, event, monkeypatch):
    clock.blocked = [2]
    steps.compiling = lambda config: config in SPACE[1:3] and event.wait()
    time = Tuner._time
    monkeypatch.setattr(Tuner, "_time", lambda *args: event.set() or time(*args))
    found = measured(Several(), 600)
    assert list(found.times)[:2] == [HEURISTIC, SPACE[3]] and set(found.times) == set(SPACE)


def test_where_the_heuristic_config_is_not_compiled_in_time_nothing_is_measured(clock, steps, event):
    clock.blocked = [1, 1]
    steps.compiling = lambda config: config == HEURISTIC and event.wait()
    with pytest.raises(BudgetSpent):
        measured(Several(), 3)


def test_so_it_is_where_values_to_measure_with_are_not_made(event):
    class Slow(Several):
        def synthetic_inputs(self, inv):
            event.wait()

    with pytest.raises(BudgetSpent):
        measured(Slow(), 0.05)


# --- What is done at once, and what is not


def test_the_heuristic_config_is_lowered_first_and_alone_and_its_time_does_not_count(clock, steps):
    class Watched(Several):
        def synthetic_inputs(self, inv):
            steps.done.append(("values", None))
            return super().synthetic_inputs(inv)

    def lowering(config):
        if config == HEURISTIC:
            assert not steps.done
            clock.now += 2.9

    steps.lowering = lowering
    assert set(measured(Watched(), 3).times) == set(SPACE) and steps.done[0] == ("lowered", HEURISTIC)
    assert steps.of("lowered") == SPACE


def test_where_that_takes_longer_than_the_budget_nothing_else_is_begun(clock, steps):
    class Watched(Several):
        def synthetic_inputs(self, inv):
            raise AssertionError("it is not to be called")

    def lowering(config):
        clock.now += 3.1

    steps.lowering = lowering
    with pytest.raises(BudgetSpent):
        measured(Watched(), 3)
    assert steps.done == [("lowered", HEURISTIC)]


def test_values_are_made_while_programs_are(steps):
    several = threading.Barrier(3, timeout=60)  # the values, and two programs

    class Watched(Several):
        def synthetic_inputs(self, inv):
            several.wait()
            return super().synthetic_inputs(inv)

    steps.compiling = lambda config: config in SPACE[:2] and several.wait()
    assert set(measured(Watched(), float("inf")).times) == set(SPACE)


def test_the_next_is_not_lowered_where_the_time_that_the_last_took_is_not_left(clock, steps):
    def lowering(config):
        clock.now += 0 if config == HEURISTIC else 1.2

    steps.lowering = lowering
    assert set(measured(Several(), 3).times) == set(SPACE[:2])
    assert steps.of("lowered") == SPACE[:2], "until 2 of 3 s there is no time for another"


def test_what_is_being_lowered_at_the_deadline_is_brought_to_its_end_and_nothing_else_is_begun(clock, steps, event):
    clock.blocked = [3, 1]
    steps.lowering = lambda config: config == SPACE[1] and event.wait()
    before = set(threading.enumerate())
    with pytest.raises(BudgetSpent):
        measured(Several(), 3)
    assert steps.of("lowered") == [HEURISTIC]
    event.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert steps.of("lowered") == SPACE[:2] and steps.of("compiled") == [HEURISTIC]


def test_a_process_that_ends_waits_for_what_is_being_lowered(tmp_path):
    script = """
import os, pathlib, sys, time
sys.path.insert(0, sys.argv[1])
from shown import HEURISTIC, OTHER, TUNED, Shown, executor, ones, ran

class Slow(Shown):
    def config_space(self, inv):
        return [HEURISTIC, TUNED, OTHER]

    def run(self, a, *, cfg):
        if cfg != HEURISTIC:
            time.sleep(2)
            pathlib.Path(sys.argv[2], str(cfg.block)).touch()
        return super().run(a, cfg=cfg)

assert ran(executor(autotune=True)(Slow(), ones())) == HEURISTIC
assert not os.listdir(sys.argv[2])
"""
    (kept := tmp_path / "kept").mkdir()
    environment = {**os.environ, "EJKERNEL_AUTOTUNE_BUDGET_S": "0.5", "EJKERNEL_AUTOTUNE_POLICY": "autotune"}
    folder = Path(shown.__file__).parent
    subprocess.run([sys.executable, "-c", script, folder, kept], env=environment, check=True)
    assert [path.name for path in kept.iterdir()] == [str(SPACE[1].block)]


def test_values_of_other_shapes_than_those_of_the_call_are_measured(steps):
    class Larger(Several):
        def synthetic_inputs(self, inv):
            return (ones(8, 8),), {}

    kernel = Larger()
    found = quick.measure(kernel, Invocation(kernel, (jax.ShapeDtypeStruct((4, 4), "float32"),), {}), budget=1e6)
    assert set(found.times) == set(SPACE)


def test_of_searches_without_result_one_line_is_told(event, monkeypatch, capsys, recwarn):
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


class OnDisk(Several):
    """Kernels that are lowered before, of the blocks `kept`."""

    kept = ()

    def run(self, a, *, cfg):
        if cfg.block not in self.kept and cfg != HEURISTIC:
            programs.check_kernels_may_be_made()
        return super().run(a, cfg=cfg)


@pytest.mark.parametrize("kept, lowered", [((3,), [3]), ((2, 4), [2, 4]), ((), [2, 3, 4])])
def test_within_a_budget_no_kernel_is_lowered_anew_where_one_is_kept_on_disk(clock, steps, kept, lowered):
    kernel = OnDisk()
    kernel.kept = kept
    assert {config.block for config in measured(kernel, 3).times} == {1, *lowered}
    assert [config.block for config in steps.of("lowered")] == [1, *lowered]


def test_without_a_budget_all_are_lowered(steps):
    assert set(measured(OnDisk(), float("inf")).times) == set(SPACE)


# --- What is kept


def test_what_came_to_nothing_in_two_processes_is_not_searched_again(slow_timing, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_BUDGET_S", "300")
    events = []

    def in_a_new_process():
        monkeypatch.setattr(progress, "_told", threading.Event())
        run = executor(
            persistent=PersistentCache(tmp_path), autotune=True, on_event=lambda event, *_: events.append(event)
        )
        config, told = ran(run(Several(), ones())), capsys.readouterr().err
        searched, _ = events == ["autotune_start", "heuristics"], events.clear()
        return config, searched, told.partition("choose (")[2].partition(";")[0]

    assert in_a_new_process() == (HEURISTIC, True, "the next may get further")
    assert in_a_new_process() == (HEURISTIC, True, "no run searches again")
    assert in_a_new_process() == (HEURISTIC, False, "")
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_BUDGET_S", "500")
    assert in_a_new_process()[0] == SPACE[1], "a larger budget is another matter"


def entry(store, key):
    with open(store.path_of()) as file:
        return json.load(file)["configs"][key]


def test_the_best_of_those_that_were_timed_is_kept_and_says_so(slow_timing, monkeypatch, tmp_path):
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
