"""Values to measure a call with, and the programs of its configs on them."""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import jax

from ..utils.device_lock import device_lock
from ..utils.operands import is_array, may_stand_for
from .budget import Deadline
from .kernel import Invocation, Kernel
from .programs import compiled_programs, lowered, started_outside_any_trace


def programs_on_values(
    kernel: Kernel,
    inv: Invocation,
    types: Invocation,
    configs: Sequence,
    first: jax.stages.Lowered,
    deadline: Deadline,
    lock: str | None,
) -> tuple[Invocation, Iterator[tuple[Any, Callable[[], Callable[[], Any]]]]]:
    """`inv` with values to measure with, and for each config, once compiled, a function that gives its call on them.

    Programs are compiled for `types` while the values are made; `first` is the lowered program of the first config.
    Where `lock` is that of the device, nothing is timed on it meanwhile.
    """
    values = started_outside_any_trace(lambda: _values(kernel, inv, lock))
    programs = compiled_programs(partial(lowered, kernel, types), configs, first, deadline)
    of_first = next(programs)
    args, kwargs = values.result(deadline.timeout())
    inv = replace(inv, args=args, kwargs=kwargs)
    if not may_stand_for((args, kwargs), (types.args, types.kwargs)):  # the kernel made other types
        programs.close()
        programs = compiled_programs(partial(lowered, kernel, inv), configs, lowered(kernel, inv, configs[0]), deadline)
        of_first = next(programs)
    return inv, _calls(of_first, programs, [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_array(leaf)])


def _values(kernel: Kernel, inv: Invocation, lock: str | None) -> tuple[tuple, dict[str, Any]]:
    """Values to measure with, of which nothing is left to compute."""
    with device_lock(lock, shared=True):
        return jax.block_until_ready(kernel.synthetic_inputs(inv))


def _calls(first: tuple[Any, Future], others: Generator, arrays: Sequence[Any]) -> Iterator[tuple[Any, Callable]]:
    with closing(others):
        for config, program in chain([first], others):
            yield config, lambda program=program: partial(program.result(), *arrays)
