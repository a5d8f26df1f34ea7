"""Calls a function in several processes at once, every call in a process of its own.

A process that ends gives back its memory of the device, which JAX would keep, and one that is killed takes no other
call with it.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")
_SPAWN = get_context("spawn")  # JAX has threads, which a forked process would lack


def results_of_processes(
    function: Callable[..., Result], calls: Mapping[Key, tuple], at_once: int, without: Callable[[str], Result]
) -> Iterator[tuple[Key, Result]]:
    """Yields the key and the result of each call, as soon as there is one; `calls` are the arguments by key.

    The function, its arguments and its results are pickled. If a process ends without a result, that is what `without`
    makes of a text that says how it ended. Closing the iterator ends all processes.
    """
    waiting, running = deque(calls.items()), {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                key, arguments = waiting.popleft()
                receiver, process = _started(function, arguments)
                running[receiver] = key, process
            for receiver in wait(list(running)):
                key, process = running[receiver]
                result = _result(receiver, process, without)
                del running[receiver]
                yield key, result
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


def _started(function: Callable[..., Result], arguments: tuple) -> tuple[Connection, BaseProcess]:
    receiver, sender = _SPAWN.Pipe(duplex=False)
    process = _SPAWN.Process(target=_call, args=(sender, function, arguments), daemon=True)
    with sender, _interrupts_ignored():
        process.start()
    return receiver, process


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """A context in which processes are started that ignore Ctrl-C: this one ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _call(sender: Connection, function: Callable[..., Result], arguments: tuple) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with sender:
        sender.send(function(*arguments))


def _end_with_parent() -> None:
    parent_process().join()
    os._exit(1)


def _result(receiver: Connection, process: BaseProcess, without: Callable[[str], Result]) -> Result:
    try:
        with receiver:
            result = receiver.recv()
    except (EOFError, OSError):  # it has sent nothing, or a part
        process.join()
        status = process.exitcode
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return without(f"its process {how}")
    process.join()
    return result
