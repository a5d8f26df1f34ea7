"""Tuner: measures the configs of a call to find the fastest.

A call is measured as compiled programs on values (its own, or synthetic ones if it is being traced), in a thread in
which no trace is in progress, so that it works within `jax.jit`. The time of a candidate counts only if its results
agree with those of the heuristic config and are the same, bit for bit, in a second run (unless its kernel says that
they need not be).

With a budget the most promising candidates, the heuristic one first, are measured until it is spent; a program that is
still compiling then is not waited for. The heuristic config is lowered first and alone. Then it is compiled, while
values to measure with are made and the next candidate is lowered; from then on time is short.
"""

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Generic

import jax
import numpy as np

from ejkernel.callib import known_ceilings
from ejkernel.errors import EjkernelRuntimeError
from ejkernel.xla_utils.symbolic import is_symbolic

from ..utils.device_lock import device_lock
from ..utils.devices import device_target
from ..utils.operands import abstract, is_array, random_types_like
from ..utils.timing import batches
from .budget import BudgetSpent, Deadline
from .checking import disagreement, same_bits
from .kernel import Invocation, Kernel
from .programs import lowered, outside_any_trace
from .progress import Progress
from .types import Cfg, hashable
from .values import programs_on_values

# A candidate whose first batch is slower than the best by this factor is not timed further.
_HOPELESS = 1.5
# Configs within the first factor of the best are timed again, interleaved, so that changes of the clock affect all
# alike; those that are still within the second are timed once more.
_NEAR = (1.5, 1.1)
# The length of their batches, which resolves a difference of 1 %.
_SECONDS_OF_A_BATCH = 2e-2
# A search ends at a config that takes at most this multiple of the time at the ceilings of the device.
_AT_THE_ROOFLINE = 1.03
# Of a budget, what the search itself may take: a call also waits for its last rounds and the file that it writes, and
# for a forward that is no longer compiled while the backward is lowered.
_SHARE_OF_A_BUDGET = 0.8

_measuring = threading.Lock()


@dataclass(frozen=True)
class Measured(Generic[Cfg]):
    """The result of measuring a call.

    Attributes:
        times: milliseconds of the configs that compute the right numbers, in the order in which they were measured.
        rejected: why each of the other configs that were tried cannot be used.
        candidates: the number of configs.
        cut_short: whether the budget was spent before the last of them.
    """

    times: dict[Cfg, float]
    rejected: dict[Cfg, str]
    candidates: int
    cut_short: bool = False

    @property
    def tried(self) -> int:
        """The number of configs that were timed or rejected."""
        return len(self.times) + len(self.rejected)

    @property
    def fastest(self) -> Cfg:
        """The config that took the least time."""
        return min(self.times, key=self.times.get)


@dataclass(frozen=True)
class Tuner:
    """Measures configs.

    Attributes:
        warmup: the number of calls before the timed ones.
        iters: the number of timed batches, of which the fastest counts, as disturbances only add time; configs near the
            best are timed in as many more.
        lock: the `lock_path` of the device, if other processes measure on it too: each times its programs alone.
        shows_progress: whether a line on stderr shows the progress.
    """

    warmup: int = 2
    iters: int = 5
    lock: str | None = None
    shows_progress: bool = True

    def refusal(self, inv: Invocation) -> str | None:
        """Why `inv` must not be measured here, None if it may be.

        Where several processes, or the shards of one, run the same program, each has to have the same config, and one
        that waits for a measurement would keep the others waiting in their collectives.
        """
        if jax.process_count() > 1:
            return "configs are not measured with several processes"
        if jax.sharding.get_abstract_mesh().manual_axes:
            return "configs are not measured under shard_map or pmap"
        if any(is_symbolic(x) for x in inv.args if is_array(x)):
            return "configs are not measured for symbolic dimensions"
        if inv.target != device_target():
            return f"configs for {inv.target} cannot be measured on {device_target()}"
        return None

    def fastest(self, kernel: Kernel[Cfg, Any], inv: Invocation, configs: Sequence[Cfg] | None = None) -> Cfg:
        """The fastest of `configs` (by default the kernel's `config_space`) whose results are right.

        Raises:
            EjkernelRuntimeError: there is none; the message gives the reason for each.
        """
        return self.measure(kernel, inv, configs).fastest

    def times(
        self, kernel: Kernel[Cfg, Any], inv: Invocation, configs: Sequence[Cfg] | None = None
    ) -> dict[Cfg, float]:
        """Milliseconds of those of `configs` whose results are right, in the order in which they were measured.

        Raises:
            EjkernelRuntimeError: there is none; the message gives the reason for each.
        """
        return self.measure(kernel, inv, configs).times

    def measure(
        self,
        kernel: Kernel[Cfg, Any],
        inv: Invocation,
        configs: Sequence[Cfg] | None = None,
        budget: float = math.inf,
    ) -> Measured[Cfg]:
        """The times of `configs`, as many as `budget` seconds allow.

        The budget begins when the heuristic config is compiled; if lowering or compiling it took longer than the
        budget, no other config would be ready in time, and none is tried. The heuristic config comes first if it is
        among them, the others follow in the given order. A config whose first batch is much slower than the best is
        not timed further, and the search ends at one that takes hardly longer than its work at the ceilings of the
        device, if these are known.

        Raises:
            EjkernelRuntimeError: no config has right results; the message gives the reason for each.
            BudgetSpent: the budget was spent before two configs could be compared.
        """
        args, kwargs = jax.tree.map(_without_tracers, (inv.args, inv.kwargs))
        inv = replace(inv, args=args, kwargs=kwargs)
        try:
            return outside_any_trace(lambda: self._measure(kernel, inv, configs, budget))
        except TimeoutError:
            raise BudgetSpent(f"{kernel.op_id}: a budget of {budget:g} s is too short to compare two configs") from None

    def _measure(self, kernel: Kernel, inv: Invocation, configs: Sequence | None, budget: float) -> Measured:
        with ExitStack() as stack:
            try:
                configs = by_priority(kernel.config_space(inv) if configs is None else configs)
                configs = dict.fromkeys(hashable(kernel.name, config) for config in configs)
                if not configs:
                    raise ValueError("there are no configs to measure")
                heuristic = kernel.heuristic_cfg(inv)
                types = replace(inv, args=random_types_like(inv.args), kwargs=random_types_like(inv.kwargs))
                lowering = Deadline(budget)
                first = lowered(kernel, types, heuristic)
                if lowering.passed:
                    raise TimeoutError
                deadline = Deadline(_SHARE_OF_A_BUDGET * budget)
                progress = stack.enter_context(Progress(kernel.op_id, len(configs), self.shows_progress))
                in_order = list(dict.fromkeys([heuristic, *configs]))
                inv, programs = programs_on_values(kernel, inv, types, in_order, first, deadline, self.lock)
                first = next(programs)
                enough = _AT_THE_ROOFLINE * _roofline(kernel, inv)
                with _measuring, device_lock(self.lock):
                    reference = jax.block_until_ready(first[1]()())
            except TimeoutError:
                raise
            except Exception as error:
                raise EjkernelRuntimeError(f"{kernel.op_id}: cannot be measured: {_first_line(error)}") from error
            of_configs = chain([first] if heuristic in configs else [], programs)
            times, rejected, right = self._one_by_one(kernel, inv, of_configs, reference, enough, deadline, progress)
            programs.close()  # nothing more is lowered or compiled
            cut_short = len(times) + len(rejected) < len(configs) and min(times.values()) > enough
            if cut_short and not rejected and times.keys() == {heuristic}:
                raise TimeoutError
            first = next(iter(times))  # was timed on a device that had been idle
            for near in _NEAR:
                limit = near * min(times.values())
                again = {c: right[c] for c in times if times[c] <= limit or c == first}
                times |= self._interleaved(again, deadline)
            return Measured(times, rejected, len(configs), cut_short)

    def _one_by_one(self, kernel, inv, programs, reference, enough, deadline, progress) -> tuple[dict, dict, dict]:
        """(milliseconds of the programs with right results, why others were rejected, the programs by config)."""
        rejected, times, right = {}, {}, {}
        for config, program in programs:
            if times and deadline.passed:
                break
            try:
                best, repeats = min(times.values(), default=math.inf), kernel.repeats(inv, config)
                run = program()
                times[config] = self._time(run, reference, best, repeats, deadline)
            except Exception as error:
                rejected[config] = _first_line(error)
                progress.tell(config, f"rejected, {rejected[config]}")
                continue
            right[config] = run
            progress.tell(config, f"{times[config]:.4f} ms")
            if times[config] <= enough:
                break
        if not times and not rejected:
            raise TimeoutError
        if not times:
            reasons = "; ".join(f"{config}: {reason}" for config, reason in rejected.items())
            raise EjkernelRuntimeError(f"{kernel.op_id}: none of the configs can be used: {reasons}")
        return times, rejected, right

    def _interleaved(self, programs: dict[Cfg, Callable[[], Any]], deadline: Deadline) -> dict[Cfg, float]:
        """Milliseconds of programs with similar times, each the least of as many interleaved rounds as time allows."""
        if len(programs) < 2:
            return {}
        rounds = []
        with _measuring, device_lock(self.lock):
            for times in zip(
                *(batches(program, 1, self.iters, _SECONDS_OF_A_BATCH) for program in programs.values()), strict=True
            ):
                rounds.append(times)
                if deadline.passed:
                    break
        return dict(zip(programs, np.min(np.array(rounds), axis=0).tolist(), strict=True))

    def _time(
        self, program: Callable[[], Any], reference: Any, best_time: float, repeats: bool, deadline: Deadline
    ) -> float:
        """Milliseconds of a program whose results are right; of the first batch only if that is much too slow."""
        with _measuring, device_lock(self.lock):
            result = program()
            if how := disagreement(result, reference):
                raise EjkernelRuntimeError(how)
            if repeats and not same_bits(result, program()):
                raise EjkernelRuntimeError("other bits in a second run")
            times = []
            for milliseconds in batches(program, self.warmup, self.iters):
                times.append(milliseconds)
                if times[0] > _HOPELESS * best_time or deadline.passed:
                    break
            return min(times)


def by_priority(configs: Sequence) -> list:
    """The configs in the order of measuring: by descending `priority`, and otherwise as they are given."""
    return sorted(configs, key=lambda config: -getattr(config, "priority", 0))


def _roofline(kernel: Kernel, inv: Invocation) -> float:
    """Milliseconds that the work takes at the ceilings of the device; 0 if these or the work are unknown."""
    cost, ceilings = kernel.cost(inv), known_ceilings(inv.target.device_kind)
    if cost is None or ceilings is None:
        return 0.0
    arrays = (leaf for leaf in jax.tree.leaves((inv.args, inv.kwargs)) if is_array(leaf))
    return 1e3 * ceilings.seconds(*cost, next(arrays).dtype)


def _first_line(error: Exception) -> str:
    return f"{error}".partition("\n")[0][:200] or type(error).__name__


def _without_tracers(x: Any) -> Any:
    return abstract(x) if isinstance(x, jax.core.Tracer) else x
