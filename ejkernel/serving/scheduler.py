"""The scheduler: which tokens of which requests a step computes.

Every decoding sequence has its last token in the step, followed by drafts; prompts are computed in chunks, with the
rest of the step's budget. Requests are served in the order of their arrival. If pages run out, the sequence that was
admitted last is preempted: it releases its pages, and waits at the head of the queue to be computed again.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .drafts import NO_DRAFTS, Drafts, Lookup
from .pages import PagePool, page_key
from .sampling import Sampling


@dataclass(eq=False)
class Request:
    """A text to be continued, and its state.

    Attributes:
        prompt: the tokens of the prompt.
        sampling: the sampling parameters.
        longest: the number of tokens of the prompt and the longest continuation.
        tokens: the prompt and the generated tokens that have been read.
        unread: the number of tokens sampled by steps whose results have not been read.
        computed: the number of tokens whose keys and values are in the cache, or are computed by a step in progress.
        pages: the pages of its keys and values.
        keys: the keys of the full pages of `tokens`.
        shared: the number of its pages that are registered for sharing.
        slot: its row in the tables of a step; None while it waits.
        listed: the number of its pages that are in these tables.
        finish_reason: "stop" after an end token, "length", or "cancelled"; None while it is not finished.
        lookup: the index for drafts.
    """

    prompt: Sequence[int]
    sampling: Sampling
    longest: int = field(init=False)
    tokens: list[int] = field(init=False)
    unread: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    shared: int = 0
    slot: int | None = None
    listed: int = 0
    finish_reason: str | None = None
    lookup: Lookup = field(default_factory=Lookup)

    def __post_init__(self) -> None:
        self.longest = len(self.prompt) + self.sampling.max_tokens
        self.tokens = list(self.prompt)

    @property
    def length(self) -> int:
        """The number of its tokens, those that have not been read included."""
        return len(self.tokens) + self.unread


class Chunk(NamedTuple):
    """The part of a step for one request: its tokens from `start` to `stop`, followed by drafts up to `end`."""

    request: Request
    start: int
    stop: int
    drafts: Drafts
    end: int
    samples: bool  # whether the text ends at `stop`, so that the next token is sampled


class Scheduler:
    """The running requests, the queue of waiting ones, and the pool of pages."""

    def __init__(self, pages: int, page_size: int, slots: int, budget: int, drafts: int, branches: int) -> None:
        self.pool = PagePool(pages)
        self.page_size, self.budget, self.drafts, self.branches = page_size, budget, drafts, branches
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of their admission
        self.preemptions = 0
        self._slots = list(reversed(range(slots)))
        # The most tokens of a decode: the last, and accepted drafts beside the first path of a tree.
        self._of_decode = 1 if branches == 1 else 1 + drafts

    def add(self, request: Request) -> None:
        """Queues a request until a slot and pages are free."""
        self.waiting.append(request)

    def finish(self, request: Request, reason: str) -> None:
        """Ends a request, running or waiting, and releases its slot and pages."""
        request.finish_reason = reason
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self._leave(request)

    def plan(self) -> list[Chunk]:
        """The chunks of the next step, whose tokens count as computed from now on; empty if no request can proceed."""
        chunks, before = [], self.preemptions
        left = self.budget
        for chunk in self._of_running():
            chunks.append(chunk)
            left -= chunk.end - chunk.start
        while left > 0 and self.preemptions == before and (request := self._admit()):
            chunk = self._chunk(request, min(request.computed + left, request.length), 0)
            chunks.append(chunk)
            left -= chunk.end - chunk.start
        return chunks

    def _of_running(self) -> Iterator[Chunk]:
        """A chunk of each running request. One token of the budget is reserved for every decoding one."""
        lengths = [(request, request.length) for request in self.running]
        going_on = [
            (request, length, length - request.computed <= self._of_decode)
            for request, length in lengths
            if length < request.longest
        ]
        reserved, left = sum(decodes for _, _, decodes in going_on), self.budget
        for request, length, decodes in going_on:
            if request.slot is None:
                continue  # preempted for one before it
            start = request.computed
            reserved -= decodes
            most = left - reserved
            stop = min(start + most, length)
            if most > 0 and self._has_pages(request, stop):
                drafts = min(self.drafts, most - (length - start), request.longest - length - 1) if decodes else 0
                chunk = self._chunk(request, stop, drafts)
                left -= chunk.end - start
                yield chunk

    def _chunk(self, request: Request, stop: int, drafts: int) -> Chunk:
        """The tokens of a request up to `stop`, and at most `drafts` drafts, as far as there are pages."""
        start, proposed = request.computed, NO_DRAFTS
        if drafts > 0:
            proposed = request.lookup.propose(request.tokens, drafts, self.branches)
        if proposed.tokens:
            missing = self._pages_of(stop + len(proposed.tokens)) - len(request.pages)
            request.pages += self.pool.allocate(max(missing, 0)) or []
            proposed = proposed.first(len(request.pages) * self.page_size - stop)
        request.computed = end = stop + len(proposed.tokens)
        if stop // self.page_size > request.shared:
            self._register(request, stop)
        return Chunk(request, start, stop, proposed, end, stop == request.length)

    def _admit(self) -> Request | None:
        """Admits the first waiting request, with shared and new pages for all its tokens; None if it cannot run yet."""
        if not self.waiting or not self._slots:
            return None
        request = self.waiting[0]
        if request.unread:  # it was preempted: its last tokens are on the device, of another slot
            return None
        self._extend_keys(request)
        # The last token is always computed, as the next one is sampled from its logits.
        shared = self.pool.share(request.keys[: (request.length - 1) // self.page_size])
        own = self.pool.allocate(self._pages_of(request.length) - len(shared))
        if own is None:
            self.pool.release(shared)
            return None
        request.pages, request.shared = shared + own, len(shared)
        request.computed = len(shared) * self.page_size
        request.slot = self._slots.pop()
        self.running.append(self.waiting.popleft())
        return request

    def _has_pages(self, request: Request, stop: int) -> bool:
        """Allocates pages for its tokens up to `stop`, by preemption if necessary; False if it is preempted itself."""
        while (missing := self._pages_of(stop) - len(request.pages)) > 0:
            found = self.pool.allocate(missing)
            if found is None:
                last = self.running[-1]
                self._leave(last)
                self.waiting.appendleft(last)
                self.preemptions += 1
                if last is request:
                    return False
            request.pages += found or []
        return True

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.pages)
        self._slots.append(request.slot)
        request.pages, request.slot = [], None
        request.computed = request.shared = request.listed = 0

    def _register(self, request: Request, stop: int) -> None:
        """Registers the full pages of known tokens up to `stop` for sharing.

        They may be shared even by the step that computes them, as every layer writes the keys and values of all tokens
        before any of them attends.
        """
        full = min(stop, len(request.tokens)) // self.page_size
        if full > request.shared:
            self._extend_keys(request)
        for i in range(request.shared, full):
            self.pool.register(request.pages[i], request.keys[i])
            request.shared = i + 1

    def _extend_keys(self, request: Request) -> None:
        for i in range(len(request.keys), len(request.tokens) // self.page_size):
            tokens = request.tokens[i * self.page_size : (i + 1) * self.page_size]
            request.keys.append(page_key(request.keys[-1] if request.keys else b"", tokens))

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
