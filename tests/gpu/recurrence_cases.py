"""Calls of the linear recurrence that together use every feature of its kernels, and their expected results."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._xla._recurrence import reference
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec


def normal(seed, shape, dtype):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def uniform(seed, shape):
    return np.random.default_rng([seed, *shape]).random(shape)


class Draw(NamedTuple):
    """The source of random arrays: by default the host, so that they are the same on every machine."""

    normal: Callable = normal
    uniform: Callable = uniform


@dataclass(frozen=True)
class Case:
    """Sizes, the largest log decay of a token in each gate that there is, and how many gates are −∞."""

    name: str
    gates: dict = field(default_factory=dict)
    B: int = 2
    H: int = 4
    G: int = 2
    D: int = 24
    V: int = 40
    state: bool = True
    ends: tuple = ()
    reverse: bool = False
    resets: float = 0.0

    def make(self, length: int, dtype, draw=Draw()) -> tuple[Operands, RecurrenceSpec]:
        """Arrays of about that many tokens a sequence."""
        B = 1 if self.ends else self.B
        ends = np.array([round(end * length) for end in self.ends], np.int32)
        S = max(ends) + 3 if self.ends else length
        axes = dict(g=(B, S, self.H), gk=(B, S, self.H, self.D), gv=(B, S, self.H, self.V), g_gamma=(1, self.H))
        gates = {name: jnp.asarray(-size * draw.uniform(9, axes[name])) for name, size in self.gates.items()}
        if self.resets:
            gates = {name: jnp.where(draw.uniform(10, x.shape) < self.resets, -jnp.inf, x) for name, x in gates.items()}
        gates = {name: x.astype(jnp.float32 if name == "g_gamma" else dtype) for name, x in gates.items()}
        n = len(ends) - 1 if self.ends else 1
        operands = Operands(
            draw.normal(1, (B, S, self.H, self.D), dtype),
            draw.normal(2, (B, S, self.G, self.D), dtype),
            draw.normal(3, (B, S, self.G, self.V), dtype),
            **gates,
            initial_state=draw.normal(4, (B, n, self.H, self.D, self.V), jnp.float32) if self.state else None,
            spans=jnp.stack([ends[:-1], ends[1:]], axis=-1)[None] if self.ends else None,
        )
        return operands, RecurrenceSpec(softmax_scale=self.D**-0.5, reverse=self.reverse)


CASES = (
    Case("no decay"),
    Case("by head", dict(g=1.0, g_gamma=0.5), state=False),
    Case("by head, fast, reversed", dict(g=30.0), reverse=True),
    Case("by feature", dict(gk=1.0)),
    Case("by feature, fast", dict(gk=30.0), G=4),
    Case("by feature and head, reversed", dict(gk=0.5, g=0.5, g_gamma=0.2), reverse=True),
    Case("packed", dict(g_gamma=0.5), ends=(0, 0.7, 0.7, 0.75, 1.6)),
    Case("packed by feature, reversed", dict(gk=0.5), ends=(0.1, 0.8, 1.5), reverse=True),
    Case("by value feature", dict(gv=1.0)),
    Case("by value feature, fast, reversed", dict(gv=30.0), reverse=True),
    Case("by head and value feature", dict(g=1.0, gv=0.5), G=4, state=False),
    Case("by both features and head", dict(gk=0.5, gv=0.5, g=0.5)),
    Case("all decays", dict(gk=0.5, gv=0.5, g=0.5, g_gamma=0.2), B=1, H=16),  # with 4 heads, errors vary too much
    Case("packed by both features", dict(gk=0.5, gv=0.5), ends=(0, 0.7, 0.7, 0.75, 1.6)),
    Case("by head, with resets", dict(g=0.5), resets=0.05),
    Case("by feature and head, with resets", dict(gk=0.5, g=0.5), resets=0.05),
    Case("by value feature, with resets, reversed", dict(gv=0.5), resets=0.05, reverse=True),
)


def poisoned(x, names=("q", "k", "v", "g", "gk", "gv")):
    """x with NaN in the tokens of no sequence, in the operands `names` [b,s,…] that there are."""
    if x.spans is None:
        return x
    token = jnp.arange(getattr(x, names[0]).shape[1])
    covered = ((x.spans[0, :, 0, None] <= token) & (token < x.spans[0, :, 1, None])).any(0)
    poison = lambda a: None if a is None else jnp.where(covered.reshape(1, -1, *(1,) * (a.ndim - 2)), a, jnp.nan)
    return x._replace(**{name: poison(getattr(x, name)) for name in names})


def differentiable(x) -> tuple[str, ...]:
    return tuple(n for n in x._fields if getattr(x, n) is not None and n != "spans")


def like(x, draw=Draw()):
    """Cotangents of all outputs."""
    return type(x)(*(draw.normal(7, a.shape, a.dtype) for a in x))


def directions(x, draw=Draw()):
    """Tangents of all that has one."""
    moving = differentiable(x)
    return type(x)(*(draw.normal(8, a.shape, a.dtype) if n in moving else None for n, a in x._asdict().items()))


def formula(x, spec, cotangents, dtype=None, reference=reference):
    """The formula's outputs and gradients; all in `dtype` if given."""
    with jax.enable_x64(True):
        return jax.jit(derivatives(reference, spec))(_in(dtype, x), _in(dtype, cotangents))


def tangent_of_formula(x, spec, tangents, dtype=None, reference=reference):
    """The tangents of the formula's outputs; all in `dtype` if given."""
    with jax.enable_x64(True):
        return jax.jit(tangent(reference, spec))(_in(dtype, x), _in(dtype, tangents))


def derivatives(f, spec):
    """The function of operands and cotangents whose result is f's outputs and gradients."""

    def run(x, cotangents):
        moving = {name: getattr(x, name) for name in differentiable(x)}
        outputs, pull = jax.vjp(lambda moving: f(*x._replace(**moving), spec=spec), moving)
        return outputs, pull(cotangents)[0]

    return run


def tangent(f, spec):
    """The function of operands and tangents whose result is the tangents of f's outputs."""

    def run(x, tangents):
        along = {name: t for name, t in tangents._asdict().items() if t is not None}
        moving = {name: getattr(x, name) for name in along}
        return jax.jvp(lambda moving: f(*x._replace(**moving), spec=spec), (moving,), (along,))[1]

    return run


def _in(dtype, tree):
    return jax.tree.map(lambda a: a.astype(dtype) if dtype and a.dtype != np.int32 else a, tree)


OUTPUTS, GRADIENTS = 2.0, 3.0
"""How many times the error of the formula one may have."""


def check(found, exact, reference, dtype) -> None:
    """Every result is as near to the exact one as it has to be."""
    for name, ratio in ratios(found, exact, reference, dtype).items():
        bound = OUTPUTS if name in Outputs._fields else GRADIENTS
        assert ratio <= bound, f"{name}: {ratio:.2f} times the error of the formula"


def check_tangent(found, exact, reference, dtype) -> None:
    """The same for tangents."""
    for name, *of in zip(Outputs._fields, found, exact, reference, strict=True):
        ratio = _ratio(*of, dtype)
        assert ratio <= GRADIENTS, f"tangent of {name}: {ratio:.2f} times the error of the formula"


def ratios(found, exact, reference, dtype) -> dict[str, float]:
    """The error of each array over that of the formula, or of rounding to the products' dtype if larger."""
    (outputs, gradients), (right, right_gradients), (other, other_gradients) = found, exact, reference
    arrays = {"o": 0, "final_state": 1}
    every = {n: (outputs[i], right[i], other[i]) for n, i in arrays.items()}
    every |= {f"d{n}": (x, right_gradients[n], other_gradients[n]) for n, x in gradients.items()}
    return {n: _ratio(*of, dtype) for n, of in every.items()}


def _ratio(x, exact, reference, dtype) -> float:
    exact = np.asarray(exact, np.float64)
    rounded = jnp.asarray(exact.astype(np.float32), dtype)
    distance = lambda a: np.linalg.norm(np.asarray(a, np.float64) - exact)
    return float(distance(x) / max(distance(reference), distance(rounded), 1e-30))
