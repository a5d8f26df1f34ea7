"""Long sequences of few heads, cut into segments that are computed side by side as if they were more of a batch.

From no state, a segment ends in h_end; from the state h it ends in exp(T) h + h_end, T its whole decay. So the ends of
all segments give the state that each begins with, and backwards in time the same holds of cotangents.
"""

import math

import jax.numpy as jnp

from ejkernel.primitives._recurrence import Operands

from .problem import Places, Problem
from .states import chunk_states

PROGRAMS = 264
"""Two for each multiprocessor of the largest GPU so far."""
SHORTEST = 1024
"""Tokens below which a segment is not cut."""


def number_of(x: Operands) -> int:
    """Into how many segments each sequence is cut: a power of two, 1 where values decay."""
    b, s, h, _ = x.q.shape
    if x.spans is not None or x.gv is not None:
        return 1
    wanted = min(PROGRAMS // (b * h * max(1, x.v.shape[3] // 64)), s // SHORTEST)
    return math.gcd(2 ** int(math.log2(max(1, wanted))), s)


def cut(a, parts: int):
    """[b,s,…] -> [b·parts,s/parts,…], which copies nothing."""
    return None if a is None else a.reshape(a.shape[0] * parts, a.shape[1] // parts, *a.shape[2:])


def joined(a, parts: int):
    """[b·parts,s,…] -> [b,parts·s,…]."""
    return a.reshape(a.shape[0] // parts, a.shape[1] * parts, *a.shape[2:])


def starts(x, y, gates, start, parts: int, p: Problem, config, *, backward: bool, precise: bool):
    """The states that all segments begin with [b·parts,1,h,d,v], and the end of the whole [b,1,h,d,v].

    Arguments are those of `chunk_states`, cut already but for `start`; for the problem of a segment.
    """
    _, ends = chunk_states(x, y, *gates, None, Places(), p, config, backward=backward, keep=False, precise=precise)
    whole = lambda a: a.reshape(p.B // parts, parts, *a.shape[2:])  # of [b·parts,1,…]
    ends, decay = whole(ends), jnp.exp(whole(_total(gates, p)))[..., None]
    state, found = jnp.zeros_like(ends[:, 0]) if start is None else start[:, 0], [None] * parts
    for i in range(parts)[:: -1 if backward != p.reverse else 1]:
        found[i] = state
        state = decay[:, i] * state + ends[:, i]
    return jnp.stack(found, axis=1).reshape(p.B, 1, *state.shape[1:]), state[:, None]


def _total(gates, p: Problem):
    """The log decays of all tokens of a segment together: [b,1,h,d], or of size 1 where all features decay alike."""
    g, gk, _, g_gamma = gates
    total = jnp.zeros((p.B, 1, p.H, 1), jnp.float32)
    if g is not None:
        total += g.sum(1, keepdims=True, dtype=jnp.float32)[..., None]
    if g_gamma is not None:
        total += p.S * g_gamma[:, None, :, None]
    return total if gk is None else total + gk.sum(1, keepdims=True, dtype=jnp.float32)
