"""The strategies by which ring attention brings queries and keys together: which are possible, which is chosen."""

from typing import Any, NamedTuple

import numpy as np

from ...callib import Ceilings
from ...types import visible_pairs
from ._ring_layout import Band, hops

STRATEGIES = ("ring", "all_gather", "ulysses", "usp")

# Rates of an H200, flops and bytes copied per second. Two H200 exchanged 64 MiB at 237 GB/s and 512 MiB at 342 GB/s,
# which is a latency of 99 µs and a rate of 365 GB/s, about a twelfth of the rate of copies.
_PRODUCTS = 680e12
_SENT, _COPY_PER_SENT = 365e9, 12.0
_START = 99e-6
# Keys of a call from which on its launch leaves multiprocessors to the collectives beside it.
_KEYS_OF_OVERLAP = 4096


class Problem(NamedTuple):
    """What the choice depends on: sizes of one sequence on a device, and the options of the call.

    `has_rows` says that a bias or mask differs between queries. Of the `size` devices, `within` are along the `axes` of
    the mesh after the first, over which usp exchanges heads.
    """

    size: int
    layout: str
    band: Band
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_head_dim: int
    dtype: Any
    has_rows: bool = False
    batch: int = 1
    axes: int = 1
    within: int = 1


def refusal(strategy: str, problem: Problem) -> str | None:
    """Why a strategy does not support a call, and what to use instead; None if it does."""
    if strategy == "ulysses":
        return _refusal_of_exchange(strategy, problem, problem.size)
    if strategy == "usp" and problem.axes < 2:
        return "usp needs two mesh axes, the ring across and the heads within: axis_name=(across, within)"
    if strategy in ("all_gather", "usp") and problem.layout == "striped" and problem.band != (None, None):
        return f"{strategy} has no causal mask and no window for rows that are striped; use ring, or the layout zigzag"
    return _refusal_of_exchange(strategy, problem, problem.within) if strategy == "usp" else None


def _refusal_of_exchange(strategy: str, problem: Problem, size: int) -> str | None:
    """Why heads cannot be exchanged for tokens over that many devices."""
    heads, kv_heads = problem.q_shape[1], problem.k_shape[1]
    if heads % size or kv_heads % size:
        return (
            f"{strategy} splits heads, and {heads} query and {kv_heads} key/value heads are no multiples of "
            f"{size} devices; use ring or repeat key/value heads"
        )
    if problem.has_rows:
        return f"{strategy} would need the bias or mask of all rows on each device; use ring or all_gather"
    return None


def choose(problem: Problem, ceilings: Ceilings | None = None) -> tuple[str, str]:
    """The strategy of "auto" and the reason: among those that support the call, the fastest forward in a model.

    Of equal times the ring is chosen, as it needs the least memory.
    """
    can = [strategy for strategy in STRATEGIES if refusal(strategy, problem) is None]
    if not can:
        raise ValueError("; ".join(refusal(strategy, problem) for strategy in STRATEGIES))
    if len(can) == 1:
        return can[0], "no other takes this call"
    times, hop = seconds(problem, ceilings), _hop(problem, ceilings)
    told = ", ".join(f"{strategy} {times[strategy] * 1e3:.2f} ms" for strategy in can)
    of_hop = f"a hop computes for {hop.computed * 1e3:.2f} ms and sends for {hop.sent * 1e3:.2f} ms, {hop.count} times"
    return min(can, key=times.__getitem__), f"a model of the forward has {told}; in a ring {of_hop}"


class Hop(NamedTuple):
    """The seconds of computing and of sending in a hop of a ring, and how many hops send: all but the first.

    `overlaps` tells whether the next keys are sent while a hop computes.
    """

    computed: float
    sent: float
    count: int
    overlaps: bool

    @property
    def seconds_of_ring(self) -> float:
        """The first hop, which only computes, and the others, in which keys arrive while the one before computes."""
        both = max(self.computed, self.sent) if self.overlaps else self.computed + self.sent
        return self.computed + self.count * both


def seconds(problem: Problem, ceilings: Ceilings | None = None) -> dict[str, float]:
    """The modelled seconds of the forward by each strategy, whether or not it supports the call.

    In a ring the first hop only computes, and each other hop takes the longer of computing and sending, or their sum if
    its calls are of less than 4096 keys, whose launches leave no multiprocessor to the sends: so a ring of 2 × 16k
    tokens over four H200 took 2.8 ms, not 1.9. all_gather and ulysses send first and then compute, and usp exchanges
    first and then is a ring over fewer devices. Products run at the measured matrix rate of the device, and data are
    sent at a twelfth of the measured rate of copies, the ratio of two H200; without measurements, at the rates of an
    H200. Each collective takes 99 µs to start: there are two, for k and v, in a ring for each hop, and with ulysses and
    usp two more, for q and o.
    """
    hop, sent, across = _hop(problem, ceilings), bytes_sent(problem), _hop(_across(problem), ceilings)
    once = lambda strategy, starts: starts * _START + problem.batch * sent[strategy] / _sent_a_second(ceilings)
    whole = hop.computed * (hop.count + 1)
    return dict(
        ring=hop.seconds_of_ring,
        all_gather=whole + once("all_gather", 2),
        ulysses=whole + once("ulysses", 4),
        usp=across.seconds_of_ring + once("usp", 4),
    )


def _across(problem: Problem) -> Problem:
    """The ring of usp, which has the tokens of the devices within on each, and a part of the heads."""
    spread = lambda shape: (shape[0] * problem.within, shape[1] // problem.within, shape[2])
    shapes = dict(q_shape=spread(problem.q_shape), k_shape=spread(problem.k_shape))
    return problem._replace(size=problem.size // problem.within, **shapes)


def _hop(problem: Problem, ceilings: Ceilings | None) -> Hop:
    """The model of a hop, which has an equal share of all visible pairs."""
    (q_len, heads, dim), kv_len, size = problem.q_shape, problem.k_shape[0], problem.size
    first, *others = hops(q_len, kv_len, size, problem.layout, problem.band)
    parts = [part for _, of_devices in (first, *others) for of_device in of_devices for part in of_device]
    overlaps = min((part.k_end - part.k_begin for part in parts), default=0) >= _KEYS_OF_OVERLAP
    count = len(others)
    pairs = visible_pairs(size * q_len, size * kv_len, False, problem.band) / size
    computed = 2.0 * problem.batch * heads * (dim + problem.v_head_dim) * pairs / _products_a_second(problem, ceilings)
    keys = problem.batch * bytes_sent(problem)["ring"] / max(1, size - 1)
    return Hop(computed / (count + 1), 2 * _START + keys / _sent_a_second(ceilings), count, overlaps)


def bytes_sent(problem: Problem) -> dict[str, int]:
    """The bytes that a device sends for one sequence in the forward by each strategy, in a ring over all hops.

    Those of usp are of its exchange, without its ring.
    """
    (q_len, heads, dim), (kv_len, kv_heads, _), value_dim = problem.q_shape, problem.k_shape, problem.v_head_dim
    each = np.dtype(problem.dtype).itemsize
    keys, queries = kv_len * kv_heads * (dim + value_dim), q_len * heads * (dim + value_dim)
    gathered = keys * each * (problem.size - 1)
    exchanged = lambda size: (keys + queries) * each * (size - 1) // size
    return dict(ring=gathered, all_gather=gathered, ulysses=exchanged(problem.size), usp=exchanged(problem.within))


def _products_a_second(problem: Problem, ceilings: Ceilings | None) -> float:
    if ceilings is None:
        return _PRODUCTS
    return ceilings.matmul.get(np.dtype(problem.dtype).name, ceilings.matmul["float32"])


def _sent_a_second(ceilings: Ceilings | None) -> float:
    return _SENT if ceilings is None else ceilings.copy / _COPY_PER_SENT
