"""Splits in time: long sequences of few heads are cut into num_splits each, computed in parallel as a larger batch.

A split that ends in h_end from a zero state ends in exp(T) h + h_end from the state h, with T the sum of its log
decays. So the initial states of all splits follow from their final states, and likewise the cotangents backwards in
time.
"""

import math

import jax.numpy as jnp

from ejkernel.primitives._recurrence import Operands

from .problem import Places, Problem
from .states import chunk_states

PROGRAMS = 264
"""Two for each multiprocessor of the largest GPU so far."""
SHORTEST = 1024
"""The least tokens of a split."""


def number_of(x: Operands, programs: int = PROGRAMS) -> int:
    """The number of splits of each sequence, for so many programs: a power of two, 1 if values decay."""
    b, s, h = *x.q.shape[:2], max(x.q.shape[2], x.v.shape[2])
    if x.spans is not None or x.gv is not None:
        return 1
    return dividing(s, min(programs // (b * h * max(1, x.v.shape[3] // 64)), s // SHORTEST))


def dividing(tokens: int, wanted: int) -> int:
    """The largest power of two up to `wanted` that divides a number of tokens."""
    return math.gcd(2 ** int(math.log2(max(1, wanted))), tokens)


def split(a, num_splits: int):
    """[b,s,…] -> [b·num_splits,s/num_splits,…], without a copy."""
    return None if a is None else a.reshape(a.shape[0] * num_splits, a.shape[1] // num_splits, *a.shape[2:])


def merged(a, num_splits: int):
    """Joins the splits of a sequence, [b·num_splits,s,…] -> [b,num_splits·s,…]."""
    return a.reshape(a.shape[0] // num_splits, a.shape[1] * num_splits, *a.shape[2:])


def initial_states(x, y, gates, start, num_splits: int, p: Problem, config, *, backward: bool, precise: bool, dt=None):
    """The initial states of all splits [b·num_splits,1,h,d,v], and the final state of the sequences [b,1,h,d,v].

    The arguments are those of `chunk_states`, already split except `start`; p is the problem of a split.
    """
    how = dict(backward=backward, precise=precise, dt=dt)
    _, ends = chunk_states(x, y, *gates, None, Places(), p, config, keep=False, **how)
    return entering(ends, gates=gates, start=start, num_splits=num_splits, p=p, backward=backward)


def entering(ends, *, gates, start, num_splits: int, p: Problem, backward: bool):
    """As `initial_states`, from the states `ends` [b·num_splits,1,h,d,v] in which splits end from zero states."""
    return passed_on(ends, jnp.exp(_total(gates, p))[..., None], start, num_splits, backward=backward != p.reverse)


def passed_on(ends, decays, start, num_splits: int, *, backward: bool):
    """The initial states of all splits [b·num_splits,1,…], and the final state of the sequences [b,1,…].

    A split takes a state h to decays ∘ h + ends; backward, from the last split to the first.
    """
    whole = lambda a: a.reshape(-1, num_splits, *a.shape[2:])  # of [b·num_splits,1,…]
    ends, decays = whole(ends), whole(decays)
    state, found = jnp.zeros_like(ends[:, 0]) if start is None else start[:, 0], [None] * num_splits
    for i in range(num_splits)[:: -1 if backward else 1]:
        found[i] = state
        state = decays[:, i] * state + ends[:, i]
    return jnp.stack(found, axis=1).reshape(-1, 1, *state.shape[1:]), state[:, None]


def _total(gates, p: Problem):
    """The sum of the log decays of a split's tokens [b,1,h,d]; the last axis is 1 if all features decay alike."""
    g, gk, _, g_gamma = gates
    total = jnp.zeros((p.B, 1, p.H, 1), jnp.float32)
    if g is not None:
        total += g.sum(1, keepdims=True, dtype=jnp.float32)[..., None]
    if g_gamma is not None:
        total += p.S * g_gamma[:, None, :, None]
    return total if gk is None else total + gk.sum(1, keepdims=True, dtype=jnp.float32)
