"""Compiles a call with each of several configs, in threads and within a deadline."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any, TypeVar

import jax

from ejkernel.errors import EjkernelRuntimeError

from ..utils.operands import is_array
from .budget import Deadline, monotonic
from .kernel import Invocation, Kernel

T = TypeVar("T")
Lower = Callable[[Any], jax.stages.Lowered]

# Without a deadline two kernels are lowered at once, as Triton's compiler releases the GIL. With one, a single kernel
# is: most of lowering is Python, in one thread at a time, and one program soon is better than two later.
_LOWERED_AT_ONCE = 2
# The share of the remaining time after which the programs that are ready are measured.
_SHARE_OF_COMPILERS = 2 / 3


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

    return jax.jit(call).lower(*(leaf for leaf in leaves if is_array(leaf)))


class KernelNotKept(EjkernelRuntimeError):
    """A lowered kernel is not on disk, and lowering it was not allowed."""


_lowering = threading.local()


@contextlib.contextmanager
def kept_kernels_only() -> Iterator[None]:
    """A context in which lowering a kernel that is not on disk raises KernelNotKept."""
    _lowering.kept_only = True
    try:
        yield
    finally:
        _lowering.kept_only = False


def check_kernels_may_be_made() -> None:
    """Called before a kernel that is not on disk is lowered.

    Raises:
        KernelNotKept: within `kept_kernels_only`.
    """
    if getattr(_lowering, "kept_only", False):
        raise KernelNotKept("the kernel is not on disk")


def compiled_in_turn(
    lower: Lower, configs: Sequence[Any], first: jax.stages.Lowered, deadline: Deadline
) -> Iterator[tuple[Any, Future]]:
    """Yields each config with its compiled program or error; `first` is the lowered program of the first config.

    From the first request on, programs are lowered in order and compiled in parallel, as many as there are cores. With
    a deadline, configs whose kernels are on disk come first, and others are lowered only if there are none, as lowering
    one takes as long as reading many. Programs are yielded in order, or as they become ready after their turn. Nothing
    is lowered while the caller measures a program, as that would disturb short calls. Programs that are not ready at
    the deadline are not yielded: those in progress are finished, as lowered kernels are stored, and no others begin.

    Raises:
        TimeoutError: the first was not ready at the deadline, or something was still being lowered.
    """
    at_once = os.cpu_count() or 1
    for start in range(0, len(configs), at_once):
        if start and deadline.passed:
            return
        batch = _Batch(lower, configs[start : start + at_once], None if start else first, deadline)
        try:
            yield from batch.ready()
        finally:
            batch.give_up()


class _Batch:
    """Programs that are lowered one after the other, and compiled at once."""

    def __init__(
        self, lower: Lower, configs: Sequence[Any], first: jax.stages.Lowered | None, deadline: Deadline
    ) -> None:
        self._lower, self._deadline, self._first = lower, deadline, configs[0] if first else None
        self._until = deadline.after(_SHARE_OF_COMPILERS)
        self._given_up = threading.Event()
        self._seconds_of_the_last = 0.0
        self._programs = {config: Future() for config in configs}
        self._as_here = _in_the_contexts_of_this_thread()
        self._compilers = ThreadPoolExecutor(len(configs))
        if first:
            self._compile(configs[0], first)
            configs = configs[1:]
        waiting, turn = iter(configs), threading.Lock()
        unlimited = deadline.timeout() is None
        work = (
            [lambda: self._lower_all(waiting, turn)] * _LOWERED_AT_ONCE
            if unlimited
            else [lambda: self._lower_kept_or_all(configs)]
        )
        lowerers = ThreadPoolExecutor(len(work))
        self._lowering = [lowerers.submit(self._as_here, each) for each in work]
        lowerers.shutdown(wait=False)

    def ready(self) -> Iterator[tuple[Any, Future]]:
        """Yields the configs whose program, or error, is ready, and the others as they become ready."""
        wait(self._programs.values(), self._until.timeout())
        self._given_up.set()
        needed = [self._programs[self._first]] if self._first is not None else []
        if wait([*needed, *self._lowering], self._deadline.timeout()).not_done:
            if self._first is None:
                return
            raise TimeoutError
        pending = dict(self._programs)
        while True:
            for config in [config for config, program in pending.items() if program.done()]:
                program = pending.pop(config)
                if not isinstance(program.exception(), CancelledError):
                    yield config, program
            if not pending or self._deadline.passed:
                return
            wait(pending.values(), self._deadline.timeout(), FIRST_COMPLETED)

    def give_up(self) -> None:
        """Stops the start of further lowerings and compilations."""
        self._given_up.set()
        self._compilers.shutdown(wait=False)

    def _lower_kept_or_all(self, configs: Sequence[Any]) -> None:
        """Lowers the configs whose kernels are on disk, or, if there are none, all while there is time."""
        others = []
        with kept_kernels_only():
            for config in configs:
                if not self._lower_next(config):
                    others.append(config)
        for config in others:
            if len(others) < len(configs):
                self._programs[config].set_exception(CancelledError())
            else:
                self._lower_next(config)

    def _lower_all(self, waiting: Iterator[Any], turn: threading.Lock) -> None:
        while True:
            with turn:
                if (config := next(waiting, None)) is None:
                    return
            self._lower_next(config)

    def _lower_next(self, config: Any) -> bool:
        """Lowers a config and starts its compilation, if there is time; False if it has to be on disk and is not."""
        try:
            # Lowering the next one is assumed to take as long as the last.
            if self._given_up.is_set() or self._seconds_of_the_last > self._until.seconds_left:
                raise CancelledError
            began = monotonic()
            made = self._lower(config)
            self._seconds_of_the_last = monotonic() - began
            if self._deadline.passed:
                raise CancelledError
            self._compile(config, made)
        except KernelNotKept:
            return False
        except Exception as error:
            self._programs[config].set_exception(error)
        return True

    def _compile(self, config: Any, made: jax.stages.Lowered) -> None:
        program = self._programs[config]

        def work():
            try:
                program.set_result(made.compile())
            except Exception as error:
                program.set_exception(error)

        self._compilers.submit(self._as_here, work)


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
