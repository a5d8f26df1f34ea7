"""Measuring: which candidates are valid, in which order they are timed, and what is logged."""

import itertools
import math
import sys
import time
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shown import HEURISTIC, OTHER, Config, Shown, executor, ones

from ejkernel.callib import Ceilings
from ejkernel.errors import EjkernelRuntimeError
from ejkernel.ops import ConfigCache, Invocation, Tuner, autotune, benchmark
from ejkernel.ops.core import progress
from ejkernel.ops.core.budget import Deadline
from ejkernel.ops.core.checking import disagreement, same_bits
from ejkernel.ops.core.tuner import by_priority
from ejkernel.ops.utils import timing
from ejkernel.ops.utils.devices import device_target
from ejkernel.types import KernelConfig

quick = Tuner(warmup=1, iters=3)


class Candidates(Shown):
    """Config(1) is the heuristic one; what the others do is a parameter."""

    def __init__(self, **does):
        super().__init__("candidates")
        self.does = tuple(does.items())

    def run(self, a, *, cfg):
        does = dict(self.does).get(f"config_{cfg.block}", lambda a: a)
        return does(jnp.sin(a))

    def config_space(self, inv):
        return [Config(2), Config(3)]


def slow(a):
    return jax.lax.fori_loop(0, 20_000, lambda i, a: jnp.where(i < 0, a + 1, a), a)


def fails(a):
    raise ValueError("this block does not divide the sequence")


# --- Which candidate wins


def test_the_fastest_wins():
    assert autotune(Candidates(config_2=slow), ones()) == Config(3)
    assert autotune(Candidates(config_3=slow), ones()) == Config(2)


def test_without_configs_there_is_nothing_to_measure():
    """An error of its own: nothing is said of a budget."""

    class NoCandidates(Candidates):
        def config_space(self, inv):
            return []

    inv = Invocation(NoCandidates(), (ones(),), {})
    for call in (lambda: autotune(Candidates(), ones(), configs=[]), lambda: quick.measure(inv.kernel, inv)):
        with pytest.raises(EjkernelRuntimeError, match="candidates@v1: cannot be measured: there are no configs"):
            call()


@pytest.mark.parametrize("bad", [fails, lambda a: a * 1.01, lambda a: a[:2], lambda a: a.at[0, 0].set(jnp.nan)])
def test_a_candidate_that_is_wrong_or_fails_never_wins(bad):
    assert autotune(Candidates(config_2=bad, config_3=slow), ones()) == Config(3)


def test_a_candidate_that_is_not_the_same_in_a_second_run_never_wins():
    turn = itertools.cycle(range(8))
    drawn = lambda a: a + jax.pure_callback(lambda: np.float32(1e-5 * next(turn)), jnp.float32(0))
    kernel = Candidates(config_2=drawn, config_3=slow)
    assert autotune(kernel, ones()) == Config(3)
    kernel.repeats = lambda inv, config: config != Config(2)  # its atomic additions, say, come in any order
    assert autotune(kernel, ones()) == Config(2)


def test_without_valid_candidates_each_reason_is_given():
    with pytest.raises(EjkernelRuntimeError, match=r"does not divide.*error of 0\.5 of the largest entry"):
        autotune(Candidates(config_2=fails, config_3=lambda a: a * 1.5), ones())


def test_without_valid_candidates_a_call_warns_once_and_uses_heuristics():
    cache, events = ConfigCache(), []
    run = executor(cache, autotune=True, on_event=lambda event, *_: events.append(event))
    kernel = Candidates(config_2=fails, config_3=fails)
    with pytest.warns(UserWarning, match="the heuristic config is used") as warned:
        for _ in range(3):
            np.testing.assert_allclose(run(kernel, ones()), np.sin(ones()), rtol=1e-6)
    assert len(warned) == 1 and len(cache) == 0 and events == ["autotune_start"] + ["heuristics"] * 3


def test_an_error_of_the_user_is_raised_by_the_call_itself():
    class Broken(Shown):
        def run(self, a, *, cfg):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        executor(autotune=True)(Broken(), ones())


# --- Times


def test_the_heuristic_config_is_measured_first():
    kernel = Candidates()
    assert list(quick.times(kernel, Invocation(kernel, (ones(),), {}), [Config(2), HEURISTIC, Config(3)])) == [
        HEURISTIC,
        Config(2),
        Config(3),
    ]


def test_a_higher_priority_is_measured_first():
    configs = [
        KernelConfig(priority=priority, block_q=block) for block, priority in ((16, 0), (32, 2), (64, 0), (128, 1))
    ]
    assert [config.block_q for config in by_priority(configs)] == [32, 128, 16, 64]
    assert by_priority(["user's", "own"]) == ["user's", "own"]


@pytest.mark.parametrize("factor, measured", [(1e3, 1), (1e-6, 3)])
def test_the_search_ends_at_the_roofline(monkeypatch, factor, measured):
    class Known(Candidates):
        def cost(self, inv):
            return 1.0, inv.args[0].nbytes * factor

    ceilings = Ceilings(device_target().device_kind, copy=1e6, matmul={"float32": 1e12}, jax="")
    monkeypatch.setattr("ejkernel.ops.core.tuner.known_ceilings", {ceilings.device_kind: ceilings}.get)
    kernel, configs = Known(), [HEURISTIC, Config(2), Config(3)]
    assert len(quick.times(kernel, Invocation(kernel, (ones(64, 64),), {}), configs)) == measured
    assert len(quick.times(Candidates(), Invocation(Candidates(), (ones(64, 64),), {}), configs)) == 3


def test_those_near_the_best_are_timed_again_interleaved():
    called = []
    program = lambda name: lambda: called.append(name) or time.sleep(25e-3)
    found = Tuner(iters=3)._interleaved({"a": program("a"), "b": program("b")}, Deadline(math.inf))
    assert called[-4:] == ["a", "b", "a", "b"] and set(found) == {"a", "b"}


def test_calls_that_the_host_issues_slowly_are_profiled(monkeypatch):
    """The time is that of the kernels, and that of the calls where they cannot be profiled."""
    x = jnp.ones((64, 64))
    program = partial(jax.jit(jnp.sin).lower(x).compile(), x)
    monkeypatch.setattr(timing, "_HOST_BOUND", 0.0)
    of_calls = list(timing.batches(program, 1, 2))
    monkeypatch.setattr(timing, "_milliseconds_of_kernels", lambda fn: 1e-9 if fn is program else None)
    assert list(timing.batches(program, 1, 2)) == [1e-9] * 2
    assert min(of_calls) > 1e-6 and min(timing.batches(lambda: program(), 1, 2)) > 1e-6


# --- Checks


def test_disagreement_distinguishes_rounding_from_errors():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.float32)
    inf, nan = x.at[0].set(-jnp.inf), x.at[0].set(jnp.nan)
    assert disagreement((x * (1 + 1e-6), inf, nan), (x, inf, nan)) is None
    assert disagreement(x.astype(jnp.bfloat16) * 1.01, x.astype(jnp.bfloat16)) is None
    assert "error" in disagreement(x.at[3, 3].add(0.5), x)
    assert "infinite" in disagreement(x, inf) and "infinite" in disagreement(nan, inf)
    assert "integers" in disagreement(jnp.arange(3), jnp.arange(3) + 1)
    assert disagreement(jnp.zeros(3), jnp.zeros(3)) is None and "shapes" in disagreement(x[:2], x)


def test_same_bits_compares_every_bit():
    x = jnp.asarray([1.0, -0.0, jnp.nan])
    assert same_bits((x, x.astype(jnp.bfloat16), jnp.arange(3)), (x, x.astype(jnp.bfloat16), jnp.arange(3)))
    assert not same_bits(x, x.at[1].set(0.0)) and not same_bits(x, x.at[0].add(2.0**-23))


# --- What is told


def test_log_names_each_candidate_with_its_time_or_its_reason(monkeypatch, capsys):
    monkeypatch.setenv("EJKERNEL_LOG_AUTOTUNE", "1")
    autotune(Candidates(config_2=fails), ones())
    first, second = capsys.readouterr().err.splitlines()
    assert "candidates@v1: Config(block=2): rejected, this block does not divide" in first
    assert "candidates@v1: Config(block=3): " in second and second.endswith(" ms")


def test_short_work_is_not_logged(monkeypatch, capfd):
    monkeypatch.setattr(progress, "QUIET_SECONDS", 600)
    autotune(Candidates(), ones())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("terminal", [False, True])
def test_long_work_logs_its_progress(monkeypatch, capsys, terminal):
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress.Progress("flash_attention_bwd@v1", 12) as count:
        count._first.join()
        count.tell(HEURISTIC, "0.1 ms")
        count.tell(OTHER, "0.2 ms")
    counts = [f"ejkernel: tuning flash_attention_bwd@v1 {done} of 12 …" for done in range(3)]
    told = "".join(f"\r\033[K{count}" for count in counts) + "\r\033[K" if terminal else counts[0] + "\n"
    assert capsys.readouterr() == ("", told)


def test_benchmark_counts_a_short_call_in_batches():
    calls = []
    benchmark(lambda: calls.append(1), num_warmup=1, num_iters=2)
    assert 20 <= len(calls) <= 110
