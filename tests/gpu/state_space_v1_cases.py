"""Calls of state_space_v1 that together use every feature of its kernels, and their expected results."""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._xla.state_space_v1 import reference
from ejkernel.primitives.state_space_v1 import Operands, StateSpaceSpec

from . import recurrence_cases, state_space_cases
from .recurrence_cases import Draw, check, differentiable, like

__all__ = ["CASES", "SPEC", "Case", "check", "check_all", "differentiable", "formula", "like"]

SPEC = StateSpaceSpec()


@dataclass(frozen=True)
class Case:
    """Sizes; how fast the states decay, −A; how large steps dt are; and the ends of sequences, in lengths."""

    name: str
    B: int = 2
    H: int = 40
    N: int = 16
    decay: float = 1.0
    step: float = 1.0
    D: bool = True
    state: bool = True
    ends: tuple = ()

    def make(self, length: int, dtype, draw=Draw()) -> Operands:
        """Arrays of about that many tokens a sequence."""
        B = 1 if self.ends else self.B
        ends = np.array([round(end * length) for end in self.ends], np.int32)
        S = max(ends) + 3 if self.ends else length
        n = len(ends) - 1 if self.ends else 1
        return Operands(
            draw.normal(1, (B, S, self.H), dtype),
            A=-self.decay * (0.1 + jnp.asarray(draw.uniform(2, (1, self.H, self.N)), jnp.float32)),
            B=draw.normal(3, (B, S, self.N), dtype),
            C=draw.normal(4, (B, S, self.N), dtype),
            dt=(self.step * jnp.asarray(draw.uniform(5, (B, S, self.H)))).astype(dtype),
            D=draw.normal(6, (1, self.H), jnp.float32) if self.D else None,
            initial_state=draw.normal(7, (B, n, self.H, self.N), jnp.float32) if self.state else None,
            spans=jnp.stack([ends[:-1], ends[1:]], axis=-1)[None] if self.ends else None,
        )


CASES = (
    Case("states of 16"),
    Case("states of 5, no skip", N=5, D=False, state=False),
    Case("states of 64", B=1, N=64, H=20),
    Case("packed", ends=(0.1, 0.7, 0.7, 0.75, 1.6, 1.63)),
    Case("packed, the last one empty", ends=(0, 0.5, 1.2, 1.2)),
    Case("fast decay", decay=30.0),
    Case("no decay", decay=0.0, step=0.1),
    Case("growth", decay=-0.5, step=0.02),
)

formula = partial(recurrence_cases.formula, reference=reference)
"""(operands, spec, cotangents, dtype) → the formula's outputs and gradients; all in `dtype` if given."""

check_all = partial(state_space_cases.check_all, reference=reference)
"""As for state_space_v2."""
