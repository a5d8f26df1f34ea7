"""What is lowered and compiled within the budget of a search, and in which order."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import shown
from shown import HEURISTIC

from ejkernel.ops.core.budget import BudgetSpent
from tests.ops.budgeted import SPACE, Several, measured


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


def test_if_that_exceeds_the_budget_nothing_else_is_begun(clock, steps):
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


def test_the_next_is_not_lowered_if_hardly_more_time_is_left_than_the_last_took(clock, steps, event):
    def lowering(config):
        clock.now += 0 if config == HEURISTIC else 1.3
        if config == SPACE[1]:
            event.set()

    steps.lowering = lowering
    steps.compiling = lambda config: config != HEURISTIC or event.wait()
    measured(Several(), 3)
    assert steps.of("lowered") == SPACE[:3], "the first of them while the heuristic config is compiled"


def test_the_next_is_not_compiled_if_hardly_more_time_is_left_than_the_last_took(clock, steps):
    def compiling(config):
        clock.now += 0 if config == HEURISTIC else 1.3

    steps.compiling = compiling
    assert list(measured(Several(), 3).times) == SPACE[:2] == steps.of("compiled")


def test_at_the_deadline_lowering_is_completed_and_nothing_else_is_begun(clock, steps, event):
    clock.blocked = [0, 1]  # the wait for the heuristic config's program, and for the next one to be lowered
    steps.lowering = lambda config: config == SPACE[1] and event.wait()
    before = set(threading.enumerate())
    with pytest.raises(BudgetSpent):
        measured(Several(), 3)
    assert steps.of("lowered") == [HEURISTIC]
    event.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert steps.of("lowered") == SPACE[:2] and steps.of("compiled") == [HEURISTIC]


def test_an_exiting_process_waits_for_lowering(tmp_path):
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
