"""The engine: it continues requests step by step.

The host plans a step while the device still computes those before it: sampled tokens stay on the device for the next
step, and the host reads them two steps late. A thread of its own launches the steps, which takes about as long as
planning them. With drafts the host has to know which were accepted before it can plan the next step, and reads the
tokens at once.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..errors import shown
from .model import HEADS, Decoder, Weights
from .program import MOST_DRAFTS, OPTIONS, Cache, Rows, Sizes, Tables, choose, empty_caches, forward
from .sampling import Kind, Sampling, SamplingArrays
from .scheduler import Chunk, Request, Scheduler


@dataclass(frozen=True)
class Limits:
    """The sizes for which programs are compiled and memory is allocated.

    Attributes:
        pages: pages of the pool, for all sequences together.
        page_size: tokens of a page.
        sequences: the largest number of sequences in a batch.
        length: the largest number of tokens of a prompt and its continuation.
        buckets: the sizes of a step in tokens, ascending, each with its program; the largest is the budget of a step.
        drafts: the largest number of draft tokens of a sequence in a step; 0 for no speculation.
        branches: the largest number of leaves of their tree; 1 for a chain.
        cache_dtype: the dtype of keys and values: that of the weights (default), float8_e4m3fn or int8.
    """

    pages: int
    page_size: int = 16
    sequences: int = 64
    length: int = 1024
    buckets: tuple[int, ...] = (16, 64, 256)
    drafts: int = 0
    branches: int = 1
    cache_dtype: Any = None

    def __post_init__(self) -> None:
        sizes = dict(pages=self.pages, page_size=self.page_size, sequences=self.sequences, length=self.length)
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"limits: {name} is {size}; it must be at least 1")
        if not self.buckets or list(self.buckets) != sorted(set(self.buckets)) or self.buckets[0] < 1:
            raise ValueError(f"limits: buckets is {self.buckets}; it must be ascending numbers of tokens")
        if self.sequences > self.buckets[-1]:
            rule = "each of them may decode in one step"
            raise ValueError(f"limits: sequences is {self.sequences} but the largest bucket {self.buckets[-1]}; {rule}")
        if self.drafts < 0:
            raise ValueError(f"limits: drafts is {self.drafts}; it must be at least 0")
        if self.branches < 1:
            raise ValueError(f"limits: branches is {self.branches}; it must be at least 1")
        if self.branches > 1 and not self.branches <= self.drafts <= MOST_DRAFTS:
            rule = f"a tree has a token for each branch, and at most {MOST_DRAFTS}"
            raise ValueError(f"limits: branches is {self.branches} and drafts {self.drafts}; {rule}")


class Event(NamedTuple):
    """The new tokens of a request in a step, and the reason if it has ended."""

    request: Request
    tokens: list[int]
    finish_reason: str | None


class Done(NamedTuple):
    """A step whose tokens have been read: its chunks, the number of pages in use, and its events."""

    chunks: list[Chunk]
    pages: int
    events: list[Event]


class _Issued(NamedTuple):
    chunks: list[Chunk]
    first_rows: list[int]
    sampled: Future[Array]
    pages: int


_AHEAD = 2
"""Steps that are issued before the tokens of one are read: one is planned, one launched and one computed at once."""


class Engine:
    """A model with a cache that continues many requests at once. It may be used by one thread at a time."""

    def __init__(self, decoder: Decoder, weights: Weights, limits: Limits, mesh: Mesh | None = None) -> None:
        dtype = weights["norm"].dtype
        cache_dtype = jnp.dtype(limits.cache_dtype or dtype)
        _check(decoder, dtype, cache_dtype, mesh)
        if limits.branches > 1 and any(window is not None for window in decoder.windows):
            rule = "a window counts slots of the cache, and drafts of a tree are not in the slots of their positions"
            raise ValueError(f"limits: branches is {limits.branches} but a layer of the decoder has a window; {rule}")
        self.decoder, self.weights, self.limits, self.mesh = decoder, weights, limits, mesh
        self.traces: Counter[Any] = Counter()  # how often each program was traced, by bucket or kind of sampling
        self.scheduler = Scheduler(
            limits.pages, limits.page_size, limits.sequences, limits.buckets[-1], limits.drafts, limits.branches
        )
        replicated = mesh and NamedSharding(mesh, P())
        self._tables = Tables(limits.sequences, self._sizes(limits.buckets[0]).pages, replicated)
        self._caches = empty_caches(decoder, limits.pages, limits.page_size, cache_dtype, mesh)
        self._last = jnp.zeros(limits.sequences, jnp.int32, device=replicated)
        self._issued: deque[_Issued] = deque()
        self._forward = jax.jit(self._counted_forward, static_argnums=(0, 1), donate_argnums=(3, 4))
        self._choose = jax.jit(self._counted_choose, static_argnums=0, donate_argnums=1)
        self._programs: dict[tuple[int, bool], jax.stages.Compiled] = {}
        self._launcher = ThreadPoolExecutor(1, "ejkernel launcher")

    def compile(self) -> None:
        """Compiles the programs of all buckets at once, and runs them without tokens, so that no request waits."""
        trees = (False, True) if self.limits.branches > 1 else (False,)
        lowered = {(n, of_trees): self._lowered(n, of_trees) for n in self.limits.buckets for of_trees in trees}
        with ThreadPoolExecutor(len(lowered)) as pool:
            self._programs |= zip(lowered, pool.map(lambda x: x.compile(OPTIONS), lowered.values()), strict=True)
        for bucket in self.limits.buckets:
            for kind in Kind:
                self._issue([], bucket, kind)[0].result().block_until_ready()
            if self.limits.branches > 1:
                self._issue([], bucket, Kind.GREEDY, trees=True)[0].result().block_until_ready()

    def submit(self, prompt: Sequence[int], sampling: Sampling = Sampling()) -> Request:
        """Adds a prompt to the queue of requests.

        Raises:
            ValueError: it can never be computed with these limits; the message says which it exceeds.
        """
        self.check(prompt, sampling)
        request = Request(prompt, sampling)
        self.scheduler.add(request)
        return request

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Raises a ValueError if such a request can never be computed with these limits; safe from any thread."""
        total, limits = len(prompt) + sampling.max_tokens, self.limits
        both = f"the prompt has {len(prompt)} tokens and max_tokens is {shown(sampling.max_tokens)}"
        if not prompt:
            raise ValueError("the prompt has no tokens; it must have at least 1")
        for name, tokens in (("a token of the prompt", prompt), ("an end token", sampling.end)):
            if not all(0 <= token < self.decoder.vocabulary for token in tokens):
                raise ValueError(f"{name} is negative, or not below {self.decoder.vocabulary}, the vocabulary")
        if total > limits.length:
            raise ValueError(f"{both}; together they may be {limits.length}")
        if total > limits.pages * limits.page_size:
            raise ValueError(f"{both}; all pages together hold {limits.pages * limits.page_size}")

    def cancel(self, request: Request) -> None:
        """Ends a request, if it has not ended, and frees its pages."""
        if request.finish_reason is None:
            self.scheduler.finish(request, "cancelled")

    @property
    def cache_bytes(self) -> int:
        """The size of the cache in bytes, on all devices together."""
        return sum(x.nbytes for x in jax.tree.leaves(self._caches))

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs, and no results are unread."""
        return not (self.scheduler.waiting or self.scheduler.running or self._issued)

    def step(self) -> Done | None:
        """Starts the next step, and reads the tokens of this or an earlier step; None if there are none to read."""
        chunks = sorted(self.scheduler.plan(), key=lambda chunk: chunk.request.slot)
        if chunks:
            tokens = sum(chunk.end - chunk.start for chunk in chunks)
            bucket = next(size for size in self.limits.buckets if size >= tokens)
            kind = max((chunk.request.sampling.kind for chunk in chunks if chunk.samples), default=Kind.GREEDY)
            trees = self.limits.branches > 1 and not all(chunk.drafts.is_chain for chunk in chunks)
            sampled, first_rows = self._issue(chunks, bucket, kind, trees)
            for chunk in chunks:
                chunk.request.unread += chunk.samples
            self._issued.append(_Issued(chunks, first_rows, sampled, self.scheduler.pool.used))
        ahead = _AHEAD if chunks and not self.limits.drafts else 0
        return self._read(self._issued.popleft()) if len(self._issued) > ahead else None

    def run(self) -> Iterator[Event]:
        """Yields the events of all submitted requests, step by step until all have ended."""
        while not self.idle:
            done = self.step()
            yield from done.events if done else ()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling = Sampling()) -> list[list[int]]:
        """The continuations of prompts, which are computed together."""
        requests = [self.submit(prompt, sampling) for prompt in prompts]
        for _ in self.run():
            pass
        return [request.tokens[len(request.prompt) :] for request in requests]

    def _issue(
        self, chunks: list[Chunk], bucket: int, kind: Kind, trees: bool = False
    ) -> tuple[Future[Array], list[int]]:
        sizes = self._sizes(bucket)
        inputs, first_rows = self._tables.step(chunks, sizes, trees)
        sampling = self._tables.sampling() if kind > Kind.GREEDY else None
        if (bucket, trees) not in self._programs:  # contexts such as a policy override belong to this thread
            self._programs[bucket, trees] = self._lowered(bucket, trees).compile(OPTIONS)
        program = self._programs[bucket, trees]
        return self._launcher.submit(self._launch, program, kind, inputs, sampling), first_rows

    def _launch(
        self, program: jax.stages.Compiled, kind: Kind, inputs: np.ndarray, sampling: SamplingArrays | None
    ) -> Array:
        """Launches the programs of a step, on the thread that has the caches and the last tokens; its tokens."""
        with self._over_mesh():
            self._caches, self._last, sampled, rows = program(self.weights, self._caches, self._last, inputs)
            if kind > Kind.GREEDY:
                self._last, sampled = self._choose(kind, self._last, rows, sampling)
        sampled.copy_to_host_async()
        return sampled

    def _lowered(self, bucket: int, trees: bool) -> jax.stages.Lowered:
        """The forward of a bucket."""
        sizes = self._sizes(bucket)
        inputs, _ = self._tables.step([], sizes)
        with self._over_mesh():
            return self._forward.lower(trees, sizes, self.weights, self._caches, self._last, inputs)

    def _over_mesh(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def _sizes(self, bucket: int) -> Sizes:
        limits, slots = self.limits, self.limits.sequences
        return Sizes(bucket, min(bucket, slots * (1 + limits.drafts)), slots, -(-limits.length // limits.page_size))

    def _counted_forward(
        self, trees: bool, sizes: Sizes, weights: Weights, caches: list[Cache], last: Array, inputs: Array
    ) -> Any:
        self.traces[("trees", sizes.tokens) if trees else sizes.tokens] += 1
        caches, rows = forward(self.decoder, weights, caches, last, sizes.inputs_in(inputs), trees)
        return caches, *choose(Kind.GREEDY, last, rows, None), rows

    def _counted_choose(self, kind: Kind, last: Array, rows: Rows, sampling: SamplingArrays) -> Any:
        self.traces[kind, rows.slot.shape[0]] += 1
        return choose(kind, last, rows, sampling)

    def _read(self, issued: _Issued) -> Done:
        sampled = np.asarray(issued.sampled.result()).tolist()
        events = []
        for chunk, row in zip(issued.chunks, issued.first_rows, strict=True):
            request = chunk.request
            if not chunk.samples:
                continue
            request.unread -= 1
            if request.finish_reason is None:
                events.append(self._continue(request, chunk, sampled[row : row + 1 + chunk.end - chunk.stop]))
        return Done(issued.chunks, issued.pages, events)

    def _continue(self, request: Request, chunk: Chunk, sampled: list[int]) -> Event:
        """Appends the accepted drafts and the token sampled after the last of them.

        Keys and values of the tree's first path are at their final places in the cache; other accepted tokens are
        computed again.
        """
        accepted = sampled
        if chunk.drafts.tokens:
            path = chunk.drafts.accepted(sampled)
            accepted = [sampled[0], *(sampled[node + 1] for node in path)]
            request.computed = chunk.stop + sum(node == depth for depth, node in enumerate(path))
        new, reason = [], None
        for token in accepted:
            new.append(token)
            request.tokens.append(token)
            if token in request.sampling.end:
                reason = "stop"
            elif len(request.tokens) == request.longest:
                reason = "length"
            if reason:
                self.scheduler.finish(request, reason)
                break
        return Event(request, new, reason)


def _check(decoder: Decoder, dtype: Any, cache_dtype: Any, mesh: Mesh | None) -> None:
    if cache_dtype not in (dtype, jnp.float8_e4m3fn, jnp.int8):
        rule = f"it must be that of the weights, {dtype}, or float8_e4m3fn or int8"
        raise ValueError(f"limits: cache_dtype is {cache_dtype}; {rule}")
    if mesh is None:
        return
    if mesh.axis_names != (HEADS,):
        raise ValueError(f"engine: the mesh has the axes {mesh.axis_names}; it must have one, {HEADS!r}")
    sizes = dict(kv_heads=decoder.kv_heads, hidden=decoder.hidden, vocabulary=decoder.vocabulary)
    for name, size in sizes.items():
        if size % mesh.size:
            raise ValueError(f"engine: {name} is {size}; {mesh.size} devices must divide it")
