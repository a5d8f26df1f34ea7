"""Splits in time: a long sequence of few heads is cut into num_splits that are computed in parallel, as a larger batch.

From the state 0 a split ends in h_end; from the state h it ends in exp(T) h + h_end, T the sum of its log decays. So
the ends of all splits give the state that each begins with, and backwards in time the same holds for cotangents.
"""

import math

import jax.numpy as jnp

from ejkernel.primitives._recurrence import Operands

from .problem import Places, Problem
from .states import chunk_states

PROGRAMS = 264
"""Two for each multiprocessor of the largest GPU so far."""
SHORTEST = 1024
"""Tokens that a split has at least."""


def number_of(x: Operands) -> int:
    """How many splits each sequence has: a power of two, 1 where values decay."""
    b, s, h = *x.q.shape[:2], max(x.q.shape[2], x.v.shape[2])
    if x.spans is not None or x.gv is not None:
        return 1
    wanted = min(PROGRAMS // (b * h * max(1, x.v.shape[3] // 64)), s // SHORTEST)
    return math.gcd(2 ** int(math.log2(max(1, wanted))), s)


def split(a, num_splits: int):
    """[b,s,…] -> [b·num_splits,s/num_splits,…], which copies nothing."""
    return None if a is None else a.reshape(a.shape[0] * num_splits, a.shape[1] // num_splits, *a.shape[2:])


def merged(a, num_splits: int):
    """[b·num_splits,s,…] -> [b,num_splits·s,…]."""
    return a.reshape(a.shape[0] // num_splits, a.shape[1] * num_splits, *a.shape[2:])


def initial_states(x, y, gates, start, num_splits: int, p: Problem, config, *, backward: bool, precise: bool):
    """The states that all splits begin with [b·num_splits,1,h,d,v], and the last state of the whole [b,1,h,d,v].

    Arguments are those of `chunk_states`, split already but for `start`; p is the problem of a split.
    """
    _, ends = chunk_states(x, y, *gates, None, Places(), p, config, backward=backward, keep=False, precise=precise)
    whole = lambda a: a.reshape(p.B // num_splits, num_splits, *a.shape[2:])  # of [b·num_splits,1,…]
    ends, decay = whole(ends), jnp.exp(whole(_total(gates, p)))[..., None]
    state, found = jnp.zeros_like(ends[:, 0]) if start is None else start[:, 0], [None] * num_splits
    for i in range(num_splits)[:: -1 if backward != p.reverse else 1]:
        found[i] = state
        state = decay[:, i] * state + ends[:, i]
    return jnp.stack(found, axis=1).reshape(p.B, 1, *state.shape[1:]), state[:, None]


def _total(gates, p: Problem):
    """The sum of the log decays of all tokens of a split: [b,1,h,d], or of size 1 where all features decay alike."""
    g, gk, _, g_gamma = gates
    total = jnp.zeros((p.B, 1, p.H, 1), jnp.float32)
    if g is not None:
        total += g.sum(1, keepdims=True, dtype=jnp.float32)[..., None]
    if g_gamma is not None:
        total += p.S * g_gamma[:, None, :, None]
    return total if gk is None else total + gk.sum(1, keepdims=True, dtype=jnp.float32)
