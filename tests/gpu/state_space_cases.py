"""Calls of state_space_v2 that together use every feature of its kernels, and their expected results."""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._xla.state_space_v2 import reference
from ejkernel.primitives.state_space_v2 import Operands, StateSpaceSpec

from . import recurrence_cases
from .recurrence_cases import Draw, check, check_tangent, differentiable, directions, like

__all__ = ["CASES", "Case", "check", "check_tangent", "differentiable", "directions", "formula", "like", "poisoned"]

SPEC = StateSpaceSpec()


@dataclass(frozen=True)
class Case:
    """Sizes; how fast the states of heads decay, −A; how large steps dt are; and the ends of sequences, in lengths."""

    name: str
    B: int = 2
    H: int = 4
    G: int = 2
    P: int = 40
    N: int = 24
    decay: float = 1.0
    step: float = 1.0
    D: bool = True
    state: bool = True
    ends: tuple = ()
    large: float = 1.0

    def make(self, length: int, dtype, draw=Draw()) -> Operands:
        """Arrays of about that many tokens a sequence."""
        B = 1 if self.ends else self.B
        ends = np.array([round(end * length) for end in self.ends], np.int32)
        S = max(ends) + 3 if self.ends else length
        n = len(ends) - 1 if self.ends else 1
        return Operands(
            draw.normal(1, (B, S, self.H, self.P), dtype),
            A=-self.decay * (0.1 + jnp.asarray(draw.uniform(2, (1, self.H)), jnp.float32)),
            B=self.large * draw.normal(3, (B, S, self.G, self.N), dtype),
            C=self.large * draw.normal(4, (B, S, self.G, self.N), dtype),
            dt=(self.step * jnp.asarray(draw.uniform(5, (B, S, self.H)))).astype(dtype),
            D=draw.normal(6, (1, self.H), jnp.float32) if self.D else None,
            initial_state=draw.normal(7, (B, n, self.H, self.P, self.N), jnp.float32) if self.state else None,
            spans=jnp.stack([ends[:-1], ends[1:]], axis=-1)[None] if self.ends else None,
        )


CASES = (
    Case("groups"),
    Case("a group for each head", G=4, state=False),
    Case("one group", G=1, H=6, D=False),
    Case("packed", ends=(0, 0.7, 0.7, 0.75, 1.6)),
    Case("fast decay", decay=30.0),
    Case("no decay", decay=0.0, step=0.1),
    Case("large logits", large=30.0),
)


poisoned = partial(recurrence_cases.poisoned, names=("x", "B", "C", "dt"))
"""x with NaN in the tokens of no sequence."""

formula = partial(recurrence_cases.formula, reference=reference)
"""(operands, spec, cotangents, dtype) → the formula's outputs and gradients; all in `dtype` if given."""


def check_all(forward, backward, tangent, x, dtype, reference=reference) -> None:
    """Outputs, gradients and tangents against the formula in float64; tokens of no sequence hold NaN."""
    hidden, wrt = poisoned(x), differentiable(x)
    outputs = forward(*hidden)
    cotangents, tangents = like(outputs), directions(x)
    gradients = dict(zip(wrt, backward(hidden, cotangents, wrt), strict=True))
    gradient_of = lambda of: recurrence_cases.formula(x, SPEC, cotangents, of, reference=reference)
    tangent_of = lambda of: recurrence_cases.tangent_of_formula(x, SPEC, tangents, of, reference=reference)
    exact, rounded = map(gradient_of, (jnp.float64, None))
    check((outputs, gradients), exact, rounded, dtype)
    check_tangent(type(outputs)(*tangent(hidden, tangents)), *map(tangent_of, (jnp.float64, None)), dtype)
