"""Calls measured by this process, or by several, which compile at once and measure one at a time."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from ..ops import Invocation, Tuner
from ..ops.config.persistent import entry_of
from ..ops.recording import pack_call, unpack_call
from ..ops.utils.device_lock import lock_path
from ..ops.utils.devices import device_target
from ..types import Target
from ._workers import results_of_processes


@dataclass(frozen=True)
class Result:
    """What measuring a call found: its fastest config, or a reason why there is none.

    Attributes:
        config: the config as it is shown.
        entry: its key and the config, as a table has them; empty if there is none.
        milliseconds, heuristic: its time, and that of the heuristic config, None if that failed.
        reason: why there is none.
        lacked_memory: whether other configs failed as memory did not suffice.
    """

    config: str = ""
    entry: dict[str, Any] = field(default_factory=dict)
    milliseconds: float | None = None
    heuristic: float | None = None
    reason: str = ""
    lacked_memory: bool = False


def how_many_processes(asked: int, calls: int) -> int:
    """How many processes measure: no more than there are calls."""
    if device_target().platform == "tpu" and asked > 1:
        raise ValueError(f"--processes {asked}: a TPU can be used by one process at a time")
    return max(min(asked, calls), 1)


def measured_calls(calls: Sequence[Invocation], processes: int, modules: Sequence[str]) -> Iterator[tuple[int, Result]]:
    """The number of each call and its result, in the order in which they are found.

    Of several processes each has memory of the device for its values, and may leave too little to others: what fails
    there, or finds that a config needs more memory, counts only if it does so alone.
    """
    tuner = Tuner(lock=lock_path(), shows_progress=processes == 1)
    if processes == 1:
        yield from ((index, _measured(inv, tuner)) for index, inv in enumerate(calls))
        return
    packed = (pack_call(inv.kernel, inv.args, inv.kwargs) for inv in calls)
    given = {index: (call, calls[index].target, tuner, modules) for index, call in enumerate(packed)}
    failed = lambda how: Result(reason=how)
    again = {}
    with closing(results_of_processes(_measured_elsewhere, given, processes, failed)) as results:
        for index, result in results:
            if result.entry and not result.lacked_memory:
                yield index, result
            else:
                again[index] = given[index]
    yield from results_of_processes(_measured_elsewhere, again, 1, failed)


def _measured_elsewhere(packed: Any, target: Target, tuner: Tuner, modules: Sequence[str]) -> Result:
    """`_measured` in a process of its own; where JAX could not open the device of the target it gives the refusal."""
    for module in modules:
        importlib.import_module(module)
    return _measured(Invocation(*unpack_call(packed), target=target), tuner)


def _measured(inv: Invocation, tuner: Tuner) -> Result:
    """Measures a call to find its fastest config."""
    kernel = inv.kernel
    if reason := tuner.refusal(inv):
        return Result(reason=reason)
    try:
        heuristic = kernel.heuristic_cfg(inv)
        found = tuner.measure(kernel, inv, [heuristic, *kernel.config_space(inv)])
        entry = {inv.key: entry_of(found.fastest)}
    except Exception as error:  # of a kernel: the other calls can still be tuned
        return Result(reason=" ".join(str(error).split()))
    lacked_memory = any("out of memory" in reason.lower() for reason in found.rejected.values())
    milliseconds = found.times[found.fastest]
    return Result(repr(found.fastest), entry, milliseconds, found.times.get(heuristic), lacked_memory=lacked_memory)
