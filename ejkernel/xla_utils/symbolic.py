"""Symbolic dimensions of `jax.export`, with which an exported program accepts arrays of any size."""

from typing import Any

import jax
import jax.export

_SUPPOSED = 1024


def is_symbolic(x: Any) -> bool:
    """Whether an array (or its type) has a symbolic dimension."""
    return any(map(jax.export.is_symbolic_dim, x.shape))


def with_known_sizes(tree: Any) -> Any:
    """The tree with the concrete size 1024 for every symbolic dimension, for heuristics."""
    leaves, structure = jax.tree.flatten(tree)
    if not any(map(is_symbolic, leaves)):
        return tree
    known = lambda n: _SUPPOSED if jax.export.is_symbolic_dim(n) else n
    types = [jax.ShapeDtypeStruct(tuple(map(known, x.shape)), x.dtype) for x in leaves]
    return jax.tree.unflatten(structure, types)


def at_most(most: int, length: Any) -> int:
    """The smaller of the two, or `most` if either is symbolic."""
    return most if any(map(jax.export.is_symbolic_dim, (most, length))) else min(most, length)
