"""Reading programs: the equations of a jaxpr, those of the programs inside it included."""

from collections.abc import Iterator
from typing import Any

import jax


def equations(jaxpr: Any, prefix: str) -> list[Any]:
    """The equations, in order, whose primitive's name is `prefix` or begins with `prefix` and an underscore."""
    names = lambda name: name == prefix or name.startswith(f"{prefix}_")
    return [equation for equation in _walk(jaxpr) if names(equation.primitive.name)]


def _walk(jaxpr: Any) -> Iterator[Any]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inside in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inside, "eqns"):
                yield from _walk(inside)
