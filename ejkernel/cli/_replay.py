"""A replay: requests of uneven lengths arrive while others are computed, and every step and token is timed.

It is deterministic: lengths are spread evenly by multiples of irrational numbers, and a few requests arrive before each
step, so that every machine does the same work in the same order, however fast it is.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from ..serving import Done, Engine, Request, Sampling

_A_STEP = 4  # requests that arrive before each step


class Arrival(NamedTuple):
    """A request, and the step before which it arrives."""

    step: int
    prompt: list[int]
    sampling: Sampling


class StepRecord(NamedTuple):
    """The work of a step, and the seconds since the end of the step before it.

    `decodes`: whether every sequence had one token in it; `bytes_moved`: the bytes of weights and cache that it reads.
    """

    seconds: float
    tokens: int
    sequences: int
    pages: int
    decodes: bool
    bytes_moved: int


@dataclass
class Replay:
    """What was measured: the steps, the seconds to the first token of each request, and those between two tokens."""

    steps: list[StepRecord] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    generated: int = 0
    seconds: float = 0.0


def lengths(count: int, bounds: tuple[int, int], irrational: float) -> list[int]:
    """Numbers within bounds, spread evenly: the fractional parts of multiples of an irrational number."""
    low, high = bounds
    return [low + math.floor((high - low + 1) * (i * irrational % 1.0)) for i in range(count)]


def arrivals(prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[Arrival]:
    """Requests, of which a few arrive before each step: each prompt is continued greedily by its number of tokens."""
    pairs = zip(prompts, outputs, strict=True)
    return [Arrival(i // _A_STEP, prompt, Sampling(max_tokens=n)) for i, (prompt, n) in enumerate(pairs)]


def replay(engine: Engine, wanted: Sequence[Arrival], show: Callable[[int, str], None]) -> Replay:
    """Submits the requests as they arrive, and steps the engine until all are finished."""
    found, coming = Replay(), deque(wanted)
    timed: list[tuple[float, Done]] = []
    last: dict[Request, float] = {}  # when it arrived, or its last token
    began = before = time.perf_counter()
    step = ended = 0
    while coming or not engine.idle:
        while coming and coming[0].step <= step:
            _, prompt, sampling = coming.popleft()
            last[engine.submit(prompt, sampling)] = time.perf_counter()
        done = engine.step()
        step += 1
        if done is None:
            continue
        now = time.perf_counter()
        timed.append((now - before, done))
        before = now
        for request, tokens, reason in done.events:
            is_first = len(request.tokens) == len(request.prompt) + len(tokens)
            (found.first if is_first else found.between).append(now - last[request])
            found.between += [0.0] * (len(tokens) - 1)  # accepted drafts come together
            found.generated += len(tokens)
            last[request] = now
            if reason:
                ended += 1
                show(ended, f"{found.generated / (now - began):,.0f} tokens a second")
    found.seconds = time.perf_counter() - began
    bytes_of = bytes_moved_by(engine)
    found.steps = [_record(done, seconds, bytes_of(done)) for seconds, done in timed]
    return found


def bytes_moved_by(engine: Engine) -> Callable[[Done], int]:
    """A function of a step: the bytes of the weights and of the visible keys and values that it has to read."""
    decoder, weights = engine.decoder, engine.weights
    of_weights = sum(x.nbytes for x in jax.tree.leaves(weights))
    of_weights -= 0 if decoder.tied else weights["embedding"].nbytes  # a lookup reads few of its rows
    layer = engine.cache_bytes // len(decoder.windows) // (engine.limits.pages * engine.limits.page_size)

    def moved(done: Done) -> int:
        visible = sum(
            min(chunk.end, (window or chunk.end) + chunk.end - chunk.start)
            for chunk in done.chunks
            for window in decoder.windows
        )
        return of_weights + layer * visible

    return moved


def _record(done: Done, seconds: float, bytes_moved: int) -> StepRecord:
    tokens = sum(chunk.end - chunk.start for chunk in done.chunks)
    decodes = all(chunk.samples and chunk.stop - chunk.start == 1 for chunk in done.chunks)
    return StepRecord(seconds, tokens, len(done.chunks), done.pages, decodes, bytes_moved)


# --- The summary ------------------------------------------------------------------------------------------------------


def summary(found: Replay, alone: float, copy: float, pages: int) -> dict[str, str]:
    """The rows of a table: rates, latencies, occupancy of batch and pool, and the fraction of the bandwidth.

    `alone`: tokens a second with one request at a time; `copy`: bytes a second of a large copy.
    """
    rate = found.generated / found.seconds
    steps = found.steps
    sequences, used = (np.array([getattr(step, name) for step in steps]) for name in ("sequences", "pages"))
    return {
        "generated": f"{rate:,.0f} tokens a second; one request at a time {alone:,.0f}, {rate / alone:.1f} times fewer",
        "computed": f"{sum(step.tokens for step in steps) / found.seconds:,.0f} tokens a second, with the prompts",
        "to the first token": _milliseconds(found.first),
        "between tokens": _milliseconds(found.between),
        "sequences in a step": f"{sequences.mean():.1f} on average, {sequences.max()} at most",
        "pages in use": f"{used.mean():,.0f} on average, {used.max():,} of {pages:,} at most",
        "share of bandwidth": f"{_share([step for step in steps if step.decodes], copy)} of steps that decode, "
        f"{_share(steps, copy)} of all, of {copy / 1e9:,.0f} GB/s",
    }


def _share(steps: Sequence[StepRecord], copy: float) -> str:
    """The median over steps of bytes moved / (bandwidth · seconds)."""
    if not steps:
        return "none"
    return f"{np.median([step.bytes_moved / copy / step.seconds for step in steps]):.1%}"


def _milliseconds(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    middle, late = np.percentile(seconds, [50, 95]) * 1e3
    return f"{middle:,.1f} ms, and 95 % within {late:,.1f} ms"
