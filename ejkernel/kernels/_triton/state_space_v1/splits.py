"""Splits in time: long sequences of few channels are cut, and their parts computed in parallel as a larger batch.

A part that ends in h_end from a zero state ends in exp(A Σ dt) ∘ h + h_end from the state h. So the initial states of
all parts follow from their final states, and likewise the cotangents backwards in time.
"""

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._triton._recurrence.splits import dividing, passed_on, split
from ejkernel.primitives.state_space_v1 import Operands

from .problem import Problem

FEW, PROGRAMS = 1024, 4096
"""With up to FEW programs of a warp, 8 for each multiprocessor of an H200, sequences are cut, for up to PROGRAMS."""
SHORTEST = 256
"""The least tokens of a part."""


def number_of(p: Problem) -> int:
    """The number of parts of each sequence: a power of two, 1 for packed sequences."""
    programs = p.B * p.blocks
    return 1 if p.packed or programs > FEW else dividing(p.S, min(PROGRAMS // programs, p.S // SHORTEST))


def parts_of(x: Operands, parts: int) -> Operands:
    """The operands of all parts, without initial states."""
    of_batch = lambda a: a if a is None or a.shape[0] == 1 else jnp.repeat(a, parts, 0)
    cut = {name: split(getattr(x, name), parts) for name in ("x", "B", "C", "dt")}
    return x._replace(**cut, A=of_batch(x.A), D=of_batch(x.D), initial_state=None)


def entering(ends: Array, start: Array | None, x: Operands, parts: int, *, backward: bool = False) -> tuple:
    """The states [b·parts,1,h,d] in which the parts x begin, and the last one [b,1,h,d], after `start` [b,1,h,d].

    `ends` [b·parts,1,h,d] are those in which they end from zero states. Backwards, parts begin at their last tokens.
    """
    decays = jnp.exp(x.A * x.dt.sum(1, dtype=jnp.float32)[..., None])[:, None]
    return passed_on(ends, decays, start, parts, backward=backward)
