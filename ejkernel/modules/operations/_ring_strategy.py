"""How ring attention brings queries and keys together: what is possible, and which of that is chosen."""

from typing import Any, NamedTuple

import numpy as np

from ...callib import Ceilings
from ...types import visible_pairs
from ._ring_layout import Band, hops

STRATEGIES = ("ring", "all_gather", "ulysses")

# Of an H200: matrix products of 680 TFLOP/s, copies of 4.25 TB/s, and 342 GB/s between two devices.
_OPERATIONS_PER_BYTE_SENT = 2000.0
_COPY_PER_SENT = 12.0


class Problem(NamedTuple):
    """What decides: the sizes [length, heads, features] of a sequence on a device, and what the call asks for."""

    size: int
    layout: str
    band: Band
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_head_dim: int
    dtype: Any
    has_pairs: bool = False
    has_dropout: bool = False


def refusal(strategy: str, problem: Problem) -> str | None:
    """Why a strategy does not take a call, and the way to go; None if it does."""
    heads, kv_heads = problem.q_shape[1], problem.k_shape[1]
    if strategy == "ulysses":
        if heads % problem.size or kv_heads % problem.size:
            return (
                f"ulysses splits heads, and {heads} query and {kv_heads} key/value heads are no multiples of "
                f"{problem.size} devices; use ring or repeat key/value heads"
            )
        if problem.has_pairs:
            return "ulysses would need the bias or mask of all rows on each device; use ring or all_gather"
        return None
    if problem.has_dropout and problem.size > 1:
        return (
            f"dropout draws for the places of a weight in one call, which are those of the whole sequence with "
            f"ulysses alone, not with {strategy}"
        )
    if strategy == "all_gather" and problem.layout == "striped" and problem.band != (None, None):
        return "all_gather has no causal mask and no window for rows that are striped; use ring, or the layout zigzag"
    return None


def choose(problem: Problem, ceilings: Ceilings | None = None) -> tuple[str, str]:
    """The strategy of "auto" and the reason.

    Of those that take the call:

    1. ring, where a hop computes for as long as it sends, since that is hidden and takes the least memory; and where
       a window leaves it half of the hops or fewer;
    2. the one of all_gather and ulysses that sends fewer bytes.

    The time of a hop is at the measured matrix rate of the device, and what is sent goes at a twelfth of the measured
    rate of copies, as between two H200; the numbers of these where nothing was measured.
    """
    can = [strategy for strategy in STRATEGIES if refusal(strategy, problem) is None]
    if not can:
        raise ValueError("; ".join(refusal(strategy, problem) for strategy in STRATEGIES))
    if len(can) == 1:
        return can[0], "no other takes this call"
    sent, per_byte = bytes_sent(problem), _operations_per_byte(problem, ceilings)
    q_len, kv_len, size = problem.q_shape[0], problem.k_shape[0], problem.size
    needed = len(list(hops(q_len, kv_len, size, problem.layout, problem.band))) - 1
    if "ring" in can and 2 * needed <= size - 1:
        return "ring", f"the window leaves {needed} of {size - 1} hops"
    computed = _operations(problem) / max(1, sent["ring"])
    told = f"a hop has {computed:.0f} operations for each byte that is sent, and {per_byte:.0f} take as long"
    if "ring" in can and computed >= per_byte:
        return "ring", told
    others = [strategy for strategy in can if strategy != "ring"]
    if not others:
        return "ring", f"{told}, but no other takes this call"
    best = min(others, key=lambda strategy: sent[strategy])
    return best, f"{told}; it sends {sent[best]} bytes of a sequence"


def bytes_sent(problem: Problem) -> dict[str, int]:
    """What a device sends of a sequence in the forward by each strategy; in a ring in all hops."""
    (q_len, heads, dim), (kv_len, kv_heads, _), value_dim = problem.q_shape, problem.k_shape, problem.v_head_dim
    each = np.dtype(problem.dtype).itemsize
    keys, queries = kv_len * kv_heads * (dim + value_dim), q_len * heads * (dim + value_dim)
    gathered = keys * each * (problem.size - 1)
    exchanged = (keys + queries) * each * (problem.size - 1) // problem.size
    return dict(ring=gathered, all_gather=gathered, ulysses=exchanged)


def _operations(problem: Problem) -> float:
    """Of the products of a device's queries with all keys but its own, as many as a device has on average."""
    (q_len, heads, dim), kv_len, size = problem.q_shape, problem.k_shape[0], problem.size
    pairs = visible_pairs(size * q_len, size * kv_len, False, problem.band) / size * (size - 1) / size
    return 2.0 * heads * (dim + problem.v_head_dim) * pairs


def _operations_per_byte(problem: Problem, ceilings: Ceilings | None) -> float:
    if ceilings is None:
        return _OPERATIONS_PER_BYTE_SENT
    return ceilings.matmul.get(np.dtype(problem.dtype).name, ceilings.matmul["float32"]) / (
        ceilings.copy / _COPY_PER_SENT
    )
