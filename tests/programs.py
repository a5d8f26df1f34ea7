"""Inspects programs: the equations of a jaxpr, and the kernels and collectives of compiled HLO."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax


def equations(jaxpr: Any, operation: str) -> list[Any]:
    """The equations that bind a primitive of an operation, in order, including those of nested jaxprs."""
    ours = lambda name: name == operation or name in (f"{operation}_jvp", f"{operation}_bwd")
    return [equation for equation in all_equations(jaxpr) if ours(equation.primitive.name)]


def launches(jaxpr: Any) -> list[str]:
    """The names of the Triton kernels that a program launches, in order."""
    return [e.params["fn"].__name__ for e in all_equations(jaxpr) if e.primitive.name == "triton_kernel_call"]


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, each before those of its nested jaxprs."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inside in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inside, "eqns"):
                yield from all_equations(inside)


def scopes(hlo: str, kernel: str) -> set[str]:
    """Where a program runs the kernel: the name-stack paths that lead to its label, in metadata of HLO instructions.

    An instruction may have several names, separated by semicolons, which also occur in the brackets of a label. Old
    versions of JAX omit the beginning of some paths.
    """
    names = (name for names in re.findall(r'op_name="([^"]*)"', hlo) for name in re.split(r";(?![^\[\]]*\])", names))
    paths = {f"/{path}" for name in names for path, found, _ in [name.partition(f"ejkernel[op={kernel};")] if found}
    return {path for path in paths if not any(other != path and other.endswith(path) for other in paths)}


def collectives(hlo: str) -> Counter:
    """How many arrays each kind of collective moves: XLA can merge several into one instruction."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast|ragged-all-to-all"
    found: Counter = Counter()
    for results, kind in re.findall(rf"= (\([^=]*?\)|\S+) ({kinds})(?:-start)?\(", hlo):
        found[kind] += len(re.findall(r"\w+\[[\d,]*\]", results))
    return found
