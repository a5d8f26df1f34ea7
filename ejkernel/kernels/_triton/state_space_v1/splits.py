"""Splits in time: long sequences of few channels are cut, and their parts computed in parallel as a larger batch.

A part that ends in h_end from a zero state ends in exp(A Σ dt) ∘ h + h_end from the state h. So the initial states of
all parts follow from their final states, and likewise the cotangents backwards in time.
"""

import math

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._triton._recurrence.splits import split
from ejkernel.primitives.state_space_v1 import Operands

from .problem import Problem

FEW, PROGRAMS = 1024, 4096
"""With up to FEW programs of a warp, 8 for each multiprocessor of an H200, sequences are cut, for up to PROGRAMS."""
SHORTEST = 256
"""The least tokens of a part."""


def number_of(p: Problem) -> int:
    """The number of parts of each sequence: a power of two, 1 for packed sequences."""
    programs = p.B * p.blocks
    wanted = 1 if p.packed or programs > FEW else min(PROGRAMS // programs, p.S // SHORTEST)
    return math.gcd(2 ** int(math.log2(max(1, wanted))), p.S)


def parts_of(x: Operands, parts: int) -> Operands:
    """The operands of all parts, without initial states."""
    of_batch = lambda a: a if a is None or a.shape[0] == 1 else jnp.repeat(a, parts, 0)
    cut = {name: split(getattr(x, name), parts) for name in ("x", "B", "C", "dt")}
    return x._replace(**cut, A=of_batch(x.A), D=of_batch(x.D), initial_state=None)


def entering(ends: Array, start: Array | None, x: Operands, parts: int, *, backward: bool = False) -> tuple:
    """The states [b·parts,1,h,d] in which the parts x begin, and the last one [b,1,h,d], after `start` [b,1,h,d].

    `ends` [b·parts,1,h,d] are those in which they end from zero states. Backwards, parts begin at their last tokens.
    """
    whole = lambda a: a.reshape(-1, parts, *a.shape[1:])
    decays, ends = whole(jnp.exp(x.A * x.dt.sum(1, dtype=jnp.float32)[..., None])), whole(ends[:, 0])
    state, found = jnp.zeros_like(ends[:, 0]) if start is None else start[:, 0], [None] * parts
    for i in range(parts)[:: -1 if backward else 1]:
        found[i] = state
        state = decays[:, i] * state + ends[:, i]
    return jnp.stack(found, 1).reshape(-1, 1, *state.shape[1:]), state[:, None]
