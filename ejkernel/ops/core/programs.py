"""A call with each of several configs as a compiled program, made in threads within the time that there is."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import jax

from ..utils.operands import is_array
from .budget import Deadline
from .kernel import Invocation, Kernel

T = TypeVar("T")

# Lowering is mostly Python, which runs one thread at a time: more at once would all be ready late.
_LOWERED_AT_ONCE = 2
# Of the time that is left, what compilers may take of it before what they have made is measured.
_SHARE_OF_COMPILERS = 2 / 3


def outside_any_trace(work: Callable[[], T], deadline: Deadline | None = None) -> T:
    """Runs `work` in a thread of its own, in the contexts of this one.

    Raises:
        TimeoutError: it was not done at the deadline. It goes on, but nothing waits for it any more.
    """
    thread = ThreadPoolExecutor(1)
    try:
        done = thread.submit(_in_the_contexts_of_this_thread(), work)
        return done.result(None if deadline is None else deadline.timeout())
    finally:
        thread.shutdown(wait=False)


def compiled_in_turn(
    kernel: Kernel, inv: Invocation, configs: Sequence[Any], deadline: Deadline
) -> Iterator[tuple[Any, Future]]:
    """Each config, in order, with its program without arguments, or the error of making it.

    As many as there are cores are compiled at once, when the first of them is due. Those that are not ready in time are
    left out, but for the first of all, which is given the whole time.
    """
    at_once = os.cpu_count() or 1
    for start in range(0, len(configs), at_once):
        if start and deadline.passed:
            return
        made = _compiled(kernel, inv, configs[start : start + at_once], deadline, start == 0)
        if start == 0 and not made[configs[0]].done():
            raise TimeoutError
        yield from ((config, program) for config, program in made.items() if _is_ready(program))


def _is_ready(program: Future) -> bool:
    return program.done() and not program.cancelled() and not isinstance(program.exception(), CancelledError)


def _compiled(kernel: Kernel, inv: Invocation, configs: Sequence[Any], deadline: Deadline, first: bool) -> dict:
    """The program of each config; with a deadline not all of them are done.

    Without one nothing is being compiled any more when this returns: compilers measure too, and would disturb. What
    overruns a deadline goes on, for a compiler cannot be stopped, and counts if it is ready when it is asked for.
    """
    leaves, structure = jax.tree.flatten((inv.args, inv.kwargs))
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    lowering, given_up = threading.Semaphore(_LOWERED_AT_ONCE), threading.Event()

    def call(config, *arrays):
        given = iter(arrays)
        args, kwargs = jax.tree.unflatten(structure, [next(given) if is_array(leaf) else leaf for leaf in leaves])
        return kernel.bind(args, kwargs, config)

    def make(config):
        with lowering:
            if given_up.is_set():
                raise CancelledError
            lowered = jax.jit(partial(call, config)).lower(*arrays)
        program = lowered.compile()
        return lambda: program(*arrays)

    as_here, compilers = _in_the_contexts_of_this_thread(), ThreadPoolExecutor(len(configs))
    made = {config: compilers.submit(as_here, partial(make, config)) for config in configs}
    wait(made.values(), deadline.timeout(_SHARE_OF_COMPILERS))
    if first:
        wait([made[configs[0]]], deadline.timeout())
    given_up.set()
    compilers.shutdown(wait=False, cancel_futures=True)
    return made


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
