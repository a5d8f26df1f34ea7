"""Tuner: the fastest config of a call.

A call is measured on values (its own, or synthetic ones where it is being traced), as compiled programs, in a thread of
its own: there no trace is in progress, so it can be done in the midst of `jax.jit`. A candidate's time counts once its
numbers agree with those of the heuristic config and are the same, bit for bit, in a second run.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from ejkernel.errors import EjkernelRuntimeError

from ..utils.devices import device_target
from ..utils.operands import abstract, is_array
from ..utils.timing import batches
from .checking import disagreement, same_bits
from .kernel import Invocation, Kernel
from .types import Cfg

# A candidate whose first batch is slower than the best by this factor is not timed further.
_HOPELESS = 1.5

_measuring = threading.Lock()


@dataclass(frozen=True)
class Tuner:
    """How to measure.

    Attributes:
        warmup: calls before the first that is timed.
        iters: batches that are timed, of which the median counts.
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
        if inv.target != device_target():
            return f"configs for {inv.target} cannot be measured on {device_target()}"
        return None

    def fastest(self, kernel: Kernel[Cfg, Any], inv: Invocation, configs: Sequence[Cfg] | None = None) -> Cfg:
        """The fastest of `configs` (by default the kernel's `config_space`) of those that compute the right numbers.

        Raises:
            EjkernelRuntimeError: there is none; the message says of each why not.
        """
        args, kwargs = jax.tree.map(_without_tracers, (inv.args, inv.kwargs))
        inv = replace(inv, args=args, kwargs=kwargs)
        return _outside_any_trace(lambda: self._fastest(kernel, inv, configs))

    def _fastest(self, kernel: Kernel[Cfg, Any], inv: Invocation, configs: Sequence[Cfg] | None) -> Cfg:
        try:
            args, kwargs = kernel.synthetic_inputs(inv)
            inv = replace(inv, args=args, kwargs=kwargs)
            heuristic = kernel.heuristic_cfg(inv)
            configs = list(dict.fromkeys(kernel.config_space(inv) if configs is None else configs))
            programs = _compiled(kernel, inv, dict.fromkeys([heuristic, *configs]))
            with _measuring:
                reference = jax.block_until_ready(programs[heuristic].result()())
        except Exception as error:
            raise EjkernelRuntimeError(f"{kernel.op_id}: cannot be measured: {_first_line(error)}") from error
        report, rejected = _Report(kernel.op_id, len(configs)), []
        best, best_time = None, float("inf")
        for config in configs:
            try:
                milliseconds = self._measured(programs[config].result(), reference, best_time)
            except Exception as error:
                rejected.append(f"{config}: {_first_line(error)}")
                report.tell(config, f"rejected, {_first_line(error)}")
                continue
            report.tell(config, f"{milliseconds:.4f} ms")
            if milliseconds < best_time:
                best, best_time = config, milliseconds
        report.close()
        if best is None:
            raise EjkernelRuntimeError(f"{kernel.op_id}: none of the configs can be used: {'; '.join(rejected)}")
        return best

    def _measured(self, program: Callable[[], Any], reference: Any, best_time: float) -> float:
        """Milliseconds of a program; only of the first batch where that is already hopeless."""
        with _measuring:
            result = program()
            if how := disagreement(result, reference):
                raise EjkernelRuntimeError(how)
            if not same_bits(result, program()):
                raise EjkernelRuntimeError("other bits in a second run")
            times = []
            for milliseconds in batches(program, self.warmup, self.iters):
                times.append(milliseconds)
                if times[0] > _HOPELESS * best_time:
                    break
            return float(np.median(times))


def _compiled(kernel: Kernel, inv: Invocation, configs: Iterable[Any]) -> dict[Any, Future]:
    """The call with each config as a compiled program without arguments, or the error of making it.

    They are lowered one by one and compiled all at once. When this returns nothing is being compiled any more, for
    compilers measure too, and would disturb.
    """
    leaves, structure = jax.tree.flatten((inv.args, inv.kwargs))
    arrays = [leaf for leaf in leaves if is_array(leaf)]

    def call(config, *arrays):
        given = iter(arrays)
        args, kwargs = jax.tree.unflatten(structure, [next(given) if is_array(leaf) else leaf for leaf in leaves])
        return kernel.bind(args, kwargs, config)

    def compile(lowered):
        program = lowered.compile()
        return lambda: program(*arrays)

    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        programs = {}
        for config in configs:
            try:
                programs[config] = compilers.submit(compile, jax.jit(partial(call, config)).lower(*arrays))
            except Exception as error:
                programs[config] = Future()
                programs[config].set_exception(error)
    return programs


def _first_line(error: Exception) -> str:
    return f"{error}".partition("\n")[0][:200] or type(error).__name__


def _without_tracers(x: Any) -> Any:
    return abstract(x) if isinstance(x, jax.core.Tracer) else x


def _outside_any_trace(work: Callable[[], Any]) -> Any:
    """Runs `work` in a thread of its own, in the contexts of this one that decide what is computed and where."""
    contexts = (
        (jax.enable_x64, jax.config.jax_enable_x64),
        (jax.default_matmul_precision, jax.config.jax_default_matmul_precision),
        (jax.default_device, jax.config.jax_default_device),
        (jax.numpy_dtype_promotion, jax.config.jax_numpy_dtype_promotion),
    )

    def run():
        with ExitStack() as stack:
            for context, value in contexts:
                stack.enter_context(context(value))
            return work()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


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
