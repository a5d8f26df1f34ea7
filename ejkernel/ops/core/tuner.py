"""Tuner: the fastest config of a call.

A call is measured on values (its own, or synthetic ones where it is being traced), as compiled programs, in a thread of
its own: there no trace is in progress, so it can be done in the midst of `jax.jit`. A candidate's time counts once its
numbers agree with those of the heuristic config and are the same, bit for bit, in a second run (unless its kernel says
that they need not be).
"""

import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np

from ejkernel.callib import known_ceilings
from ejkernel.errors import EjkernelRuntimeError
from ejkernel.xla_utils.symbolic import is_symbolic

from ..utils.devices import device_target
from ..utils.operands import abstract, is_array
from ..utils.timing import batches
from .checking import disagreement, same_bits
from .kernel import Invocation, Kernel
from .types import Cfg

# A candidate whose first batch is slower than the best by this factor is not timed further.
_HOPELESS = 1.5
# Those that come this near to the best are timed again, in turns: what the clock of the device does is shared by all.
# Those that then are still as near as the second are timed once more.
_NEAR = (1.5, 1.1)
# A batch of these lasts longer, so that a difference of one in a hundred is seen.
_SECONDS_OF_A_TURN = 2e-2
# What takes at most this much of the least time that its work can take is not improved upon.
_AT_THE_ROOFLINE = 1.03

_measuring = threading.Lock()


@dataclass(frozen=True)
class Tuner:
    """How to measure.

    Attributes:
        warmup: calls before the first that is timed.
        iters: batches that are timed, of which the shortest counts (what disturbs only adds); and as many again of
            those that are near the best.
    """

    warmup: int = 2
    iters: int = 5

    def refusal(self, inv: Invocation) -> str | None:
        """Why `inv` must not be measured here, None if it may be.

        Where several processes, or the shards of one, run the same program, each has to reach the same config, and one
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
        """The fastest of `configs` (by default the kernel's `config_space`) of those that compute the right numbers.

        Raises:
            EjkernelRuntimeError: there is none; the message says of each why not.
        """
        times = self.times(kernel, inv, configs)
        return min(times, key=times.get)

    def times(
        self, kernel: Kernel[Cfg, Any], inv: Invocation, configs: Sequence[Cfg] | None = None
    ) -> dict[Cfg, float]:
        """Milliseconds of those of `configs` that compute the right numbers, in the order in which they were measured.

        The heuristic config comes first if it is among them. One that is hopeless is timed once, and the search ends at
        one that takes hardly longer than the work takes at the ceilings of the device, where both are known.

        Raises:
            EjkernelRuntimeError: there is none; the message says of each why not.
        """
        args, kwargs = jax.tree.map(_without_tracers, (inv.args, inv.kwargs))
        inv = replace(inv, args=args, kwargs=kwargs)
        return _outside_any_trace(lambda: self._times(kernel, inv, configs))

    def _times(self, kernel: Kernel[Cfg, Any], inv: Invocation, configs: Sequence[Cfg] | None) -> dict[Cfg, float]:
        try:
            args, kwargs = kernel.synthetic_inputs(inv)
            inv = replace(inv, args=args, kwargs=kwargs)
            heuristic = kernel.heuristic_cfg(inv)
            configs = dict.fromkeys(kernel.config_space(inv) if configs is None else configs)
            enough = _AT_THE_ROOFLINE * _roofline(kernel, inv)
            programs = _compiled_in_turn(kernel, inv, list(dict.fromkeys([heuristic, *configs])))
            first = next(programs)
            with _measuring:
                reference = jax.block_until_ready(first[1].result()())
        except Exception as error:
            raise EjkernelRuntimeError(f"{kernel.op_id}: cannot be measured: {_first_line(error)}") from error
        report, rejected, times, runnable = _Report(kernel.op_id, len(configs)), [], {}, {}
        for config, program in chain([first] if heuristic in configs else [], programs):
            try:
                best, repeats = min(times.values(), default=math.inf), kernel.repeats(inv, config)
                times[config] = self._measured(program.result(), reference, best, repeats)
            except Exception as error:
                rejected.append(f"{config}: {_first_line(error)}")
                report.tell(config, f"rejected, {_first_line(error)}")
                continue
            runnable[config] = program.result()
            report.tell(config, f"{times[config]:.4f} ms")
            if times[config] <= enough:
                break
        report.close()
        if not times:
            raise EjkernelRuntimeError(f"{kernel.op_id}: none of the configs can be used: {'; '.join(rejected)}")
        for near in _NEAR:
            limit = near * min(times.values())
            times |= self._in_turns({config: runnable[config] for config in times if times[config] <= limit})
        return times

    def _in_turns(self, programs: dict[Cfg, Callable[[], Any]]) -> dict[Cfg, float]:
        """Milliseconds of programs that were measured to be about equal."""
        if len(programs) < 2:
            return {}
        with _measuring:
            rounds = zip(
                *(batches(program, 1, self.iters, _SECONDS_OF_A_TURN) for program in programs.values()), strict=True
            )
            return dict(zip(programs, np.min(np.array(list(rounds)), axis=0).tolist(), strict=True))

    def _measured(self, program: Callable[[], Any], reference: Any, best_time: float, repeats: bool) -> float:
        """Milliseconds of a program; only of the first batch where that is already hopeless."""
        with _measuring:
            result = program()
            if how := disagreement(result, reference):
                raise EjkernelRuntimeError(how)
            if repeats and not same_bits(result, program()):
                raise EjkernelRuntimeError("other bits in a second run")
            times = []
            for milliseconds in batches(program, self.warmup, self.iters):
                times.append(milliseconds)
                if times[0] > _HOPELESS * best_time:
                    break
            return min(times)


def _roofline(kernel: Kernel, inv: Invocation) -> float:
    """Milliseconds that the work takes at the ceilings of the device; 0 where kernel or device do not tell."""
    cost, ceilings = kernel.cost(inv), known_ceilings(inv.target.device_kind)
    if cost is None or ceilings is None:
        return 0.0
    arrays = (leaf for leaf in jax.tree.leaves((inv.args, inv.kwargs)) if is_array(leaf))
    return 1e3 * ceilings.seconds(*cost, next(arrays).dtype)


def _compiled_in_turn(kernel: Kernel, inv: Invocation, configs: Sequence[Any]) -> Iterator[tuple[Any, Future]]:
    """Each config with its program. As many as there are cores are compiled at once, when the first of them is due."""
    for start in range(0, len(configs), os.cpu_count()):
        yield from _compiled(kernel, inv, configs[start : start + os.cpu_count()]).items()


def _compiled(kernel: Kernel, inv: Invocation, configs: Iterable[Any]) -> dict[Any, Future]:
    """The call with each config as a compiled program without arguments, or the error of making it.

    They are lowered and compiled all at once. When this returns nothing is being compiled any more, for compilers
    measure too, and would disturb.
    """
    leaves, structure = jax.tree.flatten((inv.args, inv.kwargs))
    arrays = [leaf for leaf in leaves if is_array(leaf)]

    def call(config, *arrays):
        given = iter(arrays)
        args, kwargs = jax.tree.unflatten(structure, [next(given) if is_array(leaf) else leaf for leaf in leaves])
        return kernel.bind(args, kwargs, config)

    def make(config):
        program = jax.jit(partial(call, config)).lower(*arrays).compile()
        return lambda: program(*arrays)

    as_here = _in_the_contexts_of_this_thread()
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        return {config: compilers.submit(as_here, partial(make, config)) for config in configs}


def _first_line(error: Exception) -> str:
    return f"{error}".partition("\n")[0][:200] or type(error).__name__


def _without_tracers(x: Any) -> Any:
    return abstract(x) if isinstance(x, jax.core.Tracer) else x


def _outside_any_trace(work: Callable[[], Any]) -> Any:
    """Runs `work` in a thread of its own, in the contexts of this one."""
    as_here = _in_the_contexts_of_this_thread()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(as_here, work).result()


def _in_the_contexts_of_this_thread() -> Callable[[Callable[[], Any]], Any]:
    """What runs some work, in another thread, in the contexts of this one that decide what is computed and where."""
    contexts = (
        (jax.enable_x64, jax.config.jax_enable_x64),
        (jax.default_matmul_precision, jax.config.jax_default_matmul_precision),
        (jax.default_device, jax.config.jax_default_device),
        (jax.numpy_dtype_promotion, jax.config.jax_numpy_dtype_promotion),
    )

    def run(work):
        with ExitStack() as stack:
            for context, value in contexts:
                stack.enter_context(context(value))
            return work()

    return run


class _Report:
    """What is told while candidates are measured: each with `EJKERNEL_LOG_AUTOTUNE=1`, else a count on a terminal."""

    def __init__(self, operation: str, total: int):
        self._operation, self._total, self._done = operation, total, 0
        self._log = os.environ.get("EJKERNEL_LOG_AUTOTUNE", "0") not in ("", "0")
        self._count = not self._log and sys.stderr.isatty()

    def tell(self, config: Any, outcome: str) -> None:
        self._done += 1
        if self._log:
            print(f"ejkernel autotune {self._operation}: {config}: {outcome}", file=sys.stderr, flush=True)
        if self._count:
            bar = "=" * (20 * self._done // self._total)
            print(
                f"\rautotune {self._operation} [{bar:20}] {self._done}/{self._total}",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        if self._count:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
