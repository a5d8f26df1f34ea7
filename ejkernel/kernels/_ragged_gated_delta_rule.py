"""What implementations of ragged_gated_delta_rule share: where sequences are, and a batch of steps as one step."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.primitives.ragged_gated_delta_rule import Operands, Outputs


class Sequences(NamedTuple):
    """[…,n] int32: the first token of each sequence, the one after its last, and its slot of the pool, past the end for
    none.
    """

    first: Array
    after: Array
    slot: Array


def sequences_of(x: Operands) -> Sequences:
    """The `Sequences` of a step, or of each step of a batch."""
    cuts, states = x.query_start_loc.clip(0, x.q.shape[-3]), x.states.shape[-4]
    is_place = (x.state_indices >= 0) & (x.state_indices < states)
    return Sequences(cuts[..., :-1], cuts[..., 1:], jnp.where(is_place, x.state_indices, states))


def as_one_step(step: Callable[[Operands, Sequences], tuple[Array, Array]], x: Operands) -> Outputs:
    """o and the new states of a batch of steps, by `step` without a batch axis: o [t,h,e] and the pool [p,h,d,e].

    The steps of a batch, under `vmap`, are computed as one step, with all sequences and one pool of all states.
    """
    batch = max(a.shape[0] for a in x if a is not None)
    tokens, states = x.q.shape[1], x.states.shape[1]
    first, after, slot = sequences_of(x)
    of_step = jnp.arange(batch, dtype=np.int32)[:, None]
    first, after = (a + of_step * tokens for a in (first, after))
    slot = jnp.where(slot < states, slot + of_step * states, batch * states)
    together = lambda a: jnp.broadcast_to(a, (batch, *a.shape[1:])).reshape(batch * a.shape[1], *a.shape[2:])
    whole = Operands(*(None if a is None else together(a) for a in x))
    o, pool = step(whole, Sequences(*map(together, (first, after, slot))))
    return Outputs(o.reshape(batch, tokens, *o.shape[1:]), pool.reshape(batch, states, *pool.shape[1:]))
