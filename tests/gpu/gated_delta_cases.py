"""Calls of gated_delta_rule that together use every feature of its kernels, and their expected results."""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._xla.gated_delta_rule import reference
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec, Operands, Outputs

from . import recurrence_cases
from .recurrence_cases import Draw, check, check_tangent, differentiable, directions, like

__all__ = ["CASES", "Case", "check", "check_all", "differentiable", "formula", "like", "poisoned"]


@dataclass(frozen=True)
class Case:
    """Sizes; how fast states decay, as the largest log decay of a token; and the ends of sequences, in lengths.

    Attributes:
        decay: None for no operand g.
        all_replaced: beta is 1, instead of uniform between 0 and 1.
        spread: how much keys differ from the vector of ones; None for normal keys.
        resets: how many log decays are −∞.
    """

    name: str
    B: int = 2
    H: int = 4
    G: int = 2
    D: int = 24
    E: int = 40
    decay: float | None = 1.0
    state: bool = True
    ends: tuple = ()
    normalised: bool = True
    all_replaced: bool = False
    spread: float | None = None
    resets: float = 0.0

    def make(self, length: int, dtype, draw=Draw()) -> tuple[Operands, GatedDeltaRuleSpec]:
        """Arrays of about that many tokens a sequence."""
        B = 1 if self.ends else self.B
        ends = np.array([round(end * length) for end in self.ends], np.int32)
        S = max(ends) + 3 if self.ends else length
        n = len(ends) - 1 if self.ends else 1
        g = None if self.decay is None else jnp.asarray(-self.decay * draw.uniform(4, (B, S, self.H)), jnp.float32)
        g = g if g is None else jnp.where(draw.uniform(10, g.shape) < self.resets, -jnp.inf, g)
        keys = draw.normal(2, (B, S, self.G, self.D), dtype)
        keys = keys if self.spread is None else (1 + self.spread * keys).astype(dtype)
        beta = jnp.ones((B, S, self.H)) if self.all_replaced else jnp.asarray(draw.uniform(5, (B, S, self.H)))
        x = Operands(
            draw.normal(1, (B, S, self.G, self.D), dtype),
            keys if self.normalised else (0.5 * self.D**-0.5 * keys).astype(dtype),
            draw.normal(3, (B, S, self.H, self.E), dtype),
            beta.astype(dtype),
            g,
            draw.normal(7, (B, n, self.H, self.D, self.E), jnp.float32) if self.state else None,
            jnp.stack([ends[:-1], ends[1:]], axis=-1)[None] if self.ends else None,
        )
        return x, GatedDeltaRuleSpec(softmax_scale=self.D**-0.5, use_qk_l2norm=self.normalised)


CASES = (
    Case("groups"),
    Case("a head of keys for each of values", G=4, state=False),
    Case("no decay", decay=None, D=64),
    Case("slow decay", decay=0.03, D=64),
    Case("fast decay", decay=30.0),
    Case("resets", resets=0.05),
    Case("packed", ends=(0, 0.7, 0.7, 0.75, 1.6)),
    Case("keys as they are", normalised=False, decay=0.1),
    Case("values are replaced", all_replaced=True, D=64, decay=0.1),
    Case("similar keys", spread=0.01, decay=0.01),
)


poisoned = partial(recurrence_cases.poisoned, names=("q", "k", "v", "beta", "g"))
"""x with NaN in the tokens of no sequence."""

formula = partial(recurrence_cases.formula, reference=reference)
"""(operands, spec, cotangents, dtype) → the formula's outputs and gradients; all in `dtype` if given."""

tangent_of_formula = partial(recurrence_cases.tangent_of_formula, reference=reference)
"""(operands, spec, tangents, dtype) → the tangents of the formula's outputs."""


def check_all(forward, backward, tangent, x: Operands, spec: GatedDeltaRuleSpec, dtype) -> None:
    """Outputs, gradients and tangents against the formula in float64; tokens of no sequence hold NaN."""
    hidden, wrt = poisoned(x), differentiable(x)
    outputs = forward(*hidden, spec=spec)
    cotangents = like(outputs)
    gradients = dict(zip(wrt, backward(hidden, cotangents, wrt, spec=spec), strict=True))
    exact, rounded = (formula(x, spec, cotangents, of) for of in (jnp.float64, None))
    check((outputs, gradients), exact, rounded, dtype)
    tangents = directions(x)
    wanted = (tangent_of_formula(x, spec, tangents, of) for of in (jnp.float64, None))
    check_tangent(Outputs(*tangent(hidden, tangents, spec=spec)), *wanted, dtype)
