"""The engine on its own thread; other threads queue commands, which it executes between two steps."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from .engine import Engine
from .sampling import Sampling
from .scheduler import Request

logger = logging.getLogger(__name__)
Listener = Callable[[list[int], str | None], None]
"""Called on the engine's thread with new tokens and the finish reason or None; "failed" if the engine raised."""


class QueueFull(Exception):
    """The queue has as many requests as it may have."""


class Stopped(Exception):
    """The engine accepts no more requests: it was closed, or raised an error."""


@dataclass(eq=False)
class Ticket:
    """A submitted request; `request` is None until the engine has it."""

    prompt: Sequence[int]
    sampling: Sampling
    listener: Listener
    request: Request | None = None
    over: bool = False


class Worker:
    """Steps an engine while it has requests, and sleeps otherwise. At most `most` requests run or wait."""

    def __init__(self, engine: Engine, most: int) -> None:
        self.engine, self.most = engine, most
        self.failure: BaseException | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[Ticket, None] = {}
        self._of_request: dict[Request, Ticket] = {}
        self._lock, self._stopping = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="ejkernel engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: Sequence[int], sampling: Sampling, listener: Listener) -> Ticket:
        """Queues a prompt; the listener gets its continuation.

        Raises:
            ValueError: it can never be computed.
            QueueFull, Stopped: it cannot be queued now.
        """
        self.engine.check(prompt, sampling)
        ticket = Ticket(prompt, sampling, listener)
        with self._lock:
            if self._stopping:
                raise Stopped("the engine has stopped") from self.failure
            if len(self._tickets) >= self.most:
                raise QueueFull(f"{self.most} requests are computed or wait, which is all that may")
            self._tickets[ticket] = None
        self._commands.put(partial(self._submit, ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request, whose listener is not called any more; its pages are free after the current step."""
        self._commands.put(partial(self._cancel, ticket))

    def close(self) -> None:
        """Ends all requests and the thread."""
        with self._lock:
            self._stopping = True
        self._commands.put(lambda: None)
        self._thread.join()

    @property
    def open(self) -> int:
        """The number of requests that run or wait."""
        return len(self._tickets)

    # --- On the thread of the engine

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                done = self.engine.step()
                for request, tokens, reason in done.events if done else ():
                    ticket = self._of_request[request]
                    if reason:
                        self._end(ticket)
                    ticket.listener(tokens, reason)
        except Exception as error:
            logger.exception("the engine failed, and no more requests are accepted")
            self.failure = error
        with self._lock:
            self._stopping = True
        for ticket in list(self._tickets):
            if ticket.request and not self.failure:
                self.engine.cancel(ticket.request)
            self._end(ticket)
            ticket.listener([], "failed" if self.failure else "cancelled")

    def _obey(self) -> None:
        """Executes the queued commands; waits for one if there is nothing to compute."""
        block = self.engine.idle
        while not self._stopping:
            try:
                self._commands.get(block=block)()
            except queue.Empty:
                return
            block = False

    def _submit(self, ticket: Ticket) -> None:
        if not ticket.over:
            ticket.request = self.engine.submit(ticket.prompt, ticket.sampling)
            self._of_request[ticket.request] = ticket

    def _cancel(self, ticket: Ticket) -> None:
        if not ticket.over:
            if ticket.request:
                self.engine.cancel(ticket.request)
            self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        ticket.over = True
        self._of_request.pop(ticket.request, None)
        with self._lock:
            self._tickets.pop(ticket, None)
