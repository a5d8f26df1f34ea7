"""Shared by benchmarks over pages: chains of calls, and the formula for the last tokens of some sequences.

A chain of calls is timed, in which the output of a call is the queries of the next, so that dispatch by the host counts
for little: one jitted function here, a CUDA graph for a rival. The last output is in the place of the queries, so that
the addresses of the graph that XLA makes stay the same, as those of a rival's do. Pages are in random order.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel

from . import _referee
from ._contenders import Inputs, of_ours
from ._harness import Check, Contender


def chains(operation: str, calls: int, arrays: dict[str, Array], platforms: Sequence[str]) -> list[Contender]:
    """Ours on each platform, with its heuristic config or a tuned one.

    The queries are the first of the arrays, and the results the first and last output.
    """
    (query, q), *others = arrays.items()
    given = Inputs((q,), others=dict(others), carried=True)

    def chain(platform: str | None) -> Any:
        call = partial(getattr(ejkernel.lax, operation), platform=platform)

        def run(q: Array, **others: Array) -> tuple[Array, Array]:
            outputs = [q]
            for _ in range(calls):
                outputs.append(call(**{query: outputs[-1]}, **others))
            return outputs[1], outputs[-1]

        return run

    return of_ours(operation, platforms, chain, "step", given)


def check(q: Array, keys: Array, values: Array, last: int, scale: float, tokens: Any) -> Check:
    """Judges the first output of a chain for the tokens (an index) of some sequences.

    q [n,t,g,r,d] are their queries, the last of `last` keys of each sequence; keys [n,k,g,d] and values [n,k,g,e].
    """
    n, t, g, r, _ = q.shape
    columns = jnp.arange(keys.shape[1])
    of_head = partial(_referee.attention, visible=lambda i: columns <= last - t + i, scale=scale)
    of_all = jax.vmap(jax.vmap(of_head, in_axes=(1, 1, 1), out_axes=1))

    def formula(dtype: Any) -> list[Array]:
        return [jax.jit(of_all)(*(jnp.asarray(np.asarray(x), dtype) for x in (q, keys, values)))]

    shape = n, t, g, r, values.shape[-1]
    return _referee.check(lambda results: [results[0][tokens].reshape(shape)], formula, q.dtype)


def pages_of(pool: Array, tables: Array) -> Array:
    """The slots of some sequences in the order of positions, [n, slots, …]."""
    found = pool[tables]
    return found.reshape(found.shape[0], -1, *found.shape[3:])
