"""Compiles a call with each of several configs, in threads: all at once, or one by one until a deadline."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, TypeVar

import jax

from ..utils.operands import is_array
from .budget import Deadline, monotonic
from .kernel import Invocation, Kernel

T = TypeVar("T")
Lower = Callable[[Any], jax.stages.Lowered]

# Without a deadline two kernels are lowered at once, as Triton's compiler releases the GIL.
_LOWERED_AT_ONCE = 2
# With a deadline something is begun if it may take this multiple of the time that the last one took.
_MARGIN = 1.5
_this_thread = threading.local()


def outside_any_trace(work: Callable[[], T]) -> T:
    """Runs `work` in a new thread, where no trace is in progress, with the contexts of this one."""
    return started_outside_any_trace(work).result()


def started_outside_any_trace(work: Callable[[], T]) -> Future:
    """Starts `work` in a new thread, where no trace is in progress, with the contexts of this one."""
    thread = ThreadPoolExecutor(1)
    try:
        return thread.submit(_in_the_contexts_of_this_thread(), work)
    finally:
        thread.shutdown(wait=False)


def lowered(kernel: Kernel, inv: Invocation, config: Any) -> jax.stages.Lowered:
    """The call of `inv` with a config, lowered as a program of its arrays, which need no values."""
    leaves, structure = jax.tree.flatten((inv.args, inv.kwargs))

    def call(*arrays):
        given = iter(arrays)
        args, kwargs = jax.tree.unflatten(structure, [next(given) if is_array(leaf) else leaf for leaf in leaves])
        return kernel.bind(args, kwargs, config)

    _this_thread.lowers_a_candidate = True
    try:
        return jax.jit(call).lower(*(leaf for leaf in leaves if is_array(leaf)))
    finally:
        _this_thread.lowers_a_candidate = False


def compile_ahead(kernel: jax.stages.Lowered) -> None:
    """Starts to compile a kernel of a program that is still being lowered, whose compilation then finds it compiled.

    An error comes again there. Nothing is begun for a candidate of a search, which decides what is compiled when.
    """
    if not getattr(_this_thread, "lowers_a_candidate", False):
        started_outside_any_trace(kernel.compile)


def compiled_programs(
    lower: Lower, configs: Sequence[Any], first: jax.stages.Lowered, deadline: Deadline
) -> Iterator[tuple[Any, Future]]:
    """Yields configs with their compiled program or error, in order; `first` is the lowered program of the first one.

    Nothing is lowered while the caller measures a program, as that would disturb short calls.

    Raises:
        TimeoutError: the first was not ready at the deadline.
    """
    if deadline.timeout() is None:
        return _all_at_once(lower, configs, first)
    return _one_by_one(lower, configs, first, deadline)


def _all_at_once(lower: Lower, configs: Sequence[Any], first: jax.stages.Lowered) -> Iterator[tuple[Any, Future]]:
    """All configs, as many at once as there are cores."""
    at_once, turn = os.cpu_count() or 1, threading.Semaphore(_LOWERED_AT_ONCE)

    def compiled(config):
        if config == configs[0]:
            return first.compile()
        with turn:
            made = lower(config)
        return made.compile()

    with ThreadPoolExecutor(at_once) as threads:
        as_here = _in_the_contexts_of_this_thread()
        for start in range(0, len(configs), at_once):
            batch = {c: threads.submit(as_here, partial(compiled, c)) for c in configs[start : start + at_once]}
            wait(batch.values())
            yield from batch.items()


def _one_by_one(
    lower: Lower, configs: Sequence[Any], first: jax.stages.Lowered, deadline: Deadline
) -> Iterator[tuple[Any, Future]]:
    """The configs that are ready by the deadline, which is restarted when the first one is.

    While a program is compiled the next one is lowered; while the caller measures it, the next one is compiled. Mosaic
    GPU compiles one kernel at a time, and whoever needs another one waits: so a single program is compiled at a time,
    and none that may not be ready by the deadline.
    """
    rest = iter(configs[1:])
    with closing(_Thread(deadline)) as lowering, closing(_Thread(deadline)) as compiling:
        start = lambda config: None if config is None else lowering.start(partial(lower, config))
        config, program = configs[0], compiling.start(first.compile)
        made = start(following := next(rest, None))
        if not _is_done(program, deadline):
            raise TimeoutError
        deadline.restart()
        while True:
            coming = compiling.start(partial(_compiled, made)) if made and _is_done(made, deadline) else None
            yield config, program
            if coming is None:
                return
            config, program = following, coming
            made = start(following := next(rest, None))
            if not _is_done(program, deadline):
                return


class _Thread:
    """A thread that does one thing after the other, each if enough time is left by how long the last one took."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline, self._seconds = deadline, 0.0
        self._thread, self._as_here = ThreadPoolExecutor(1), _in_the_contexts_of_this_thread()

    def start(self, work: Callable[[], Any]) -> Future | None:
        """The result to come, or None if there is no time."""
        if self._deadline.passed or _MARGIN * self._seconds > self._deadline.seconds_left:
            return None
        return self._thread.submit(self._as_here, partial(self._timed, work))

    def close(self) -> None:
        """Begins nothing more; what is in progress is completed, as lowered kernels are kept on disk."""
        self._thread.shutdown(wait=False)

    def _timed(self, work):
        began = monotonic()
        try:
            return work()
        finally:
            self._seconds = monotonic() - began


def _compiled(made: Future) -> Any:
    return made.result().compile()


def _is_done(result: Future, deadline: Deadline) -> bool:
    """Whether a result, or an error, is there by the deadline."""
    return not wait([result], deadline.timeout()).not_done


def _in_the_contexts_of_this_thread() -> Callable[[Callable[[], Any]], Any]:
    """A function that runs work in another thread, with the contexts of this thread that affect the computation."""
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
