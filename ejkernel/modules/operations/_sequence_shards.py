"""The linear recurrence over a sequence that is sharded over devices: the initial state of each device's shard.

The tokens j = 1 … c of a shard, with log decays g, take a state h to

    exp(Σ_l g_l) · h + H,    H = Σ_j exp(Σ_{l>j} g_l) · k_j v_jᵀ

Each device computes H, by the recurrence's own kernels without an output, and Σ g of its shard. All devices gather
these, and each applies those of the devices before it, one after the other. The recurrence itself then runs once, from
the right state, so that o is rounded once, as for a sequence on one device.

With h the initial and h' the final state of a shard, the tangent of the recurrence is the sum of that for a constant h,
which gives a dh' too, and that for dh alone. The dh of each device are made of the dh' of those before it as h is made
of H. Transposed, the cotangents of h come first, from the output alone; gathered, they are those of h', with which one
backward computes all gradients.

Each device sends one state for each head, whatever the length. The all-gather of n devices sends n − 1 states from each
device where a scan would send log₂ n, but all at once: with states of a few MB, a step costs more to start than to
send. It is one collective for any number of devices, and its transpose is one reduce-scatter.

At most one packed sequence continues from a device to the next, so a device sends the state of one sequence, that of
its last token in time; all devices know from cu_seqlens on which of them it began.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...primitives._recurrence import Operands, Outputs
from ._arguments import array, axis_size, int32, require_known, vary_alike
from ._sequence_shard import Shard, all_gather, decays, gathered_shards

Recurrence = Callable[[Operands], Outputs]
"""The recurrence over the tokens of one device, from `initial_state`."""


@dataclass(frozen=True)
class Shards:
    """The sharding of one sequence, or of several packed ones, over a mesh axis.

    Attributes:
        axis_name: the mesh axis, or axes.
        size: the number of devices.
        length: the number of tokens on each device.
        reverse: time runs from the last token to the first.
        cuts: where sequences begin and end, among the tokens of all devices: [sequences + 1] int32.
    """

    axis_name: Any
    size: int
    length: int
    reverse: bool
    cuts: Array

    @property
    def index(self) -> Array:
        """The index of this device along the axis."""
        return lax.axis_index(self.axis_name)

    @property
    def first(self) -> Array:
        """The index of this device's first token among the tokens of all devices."""
        return self.index * self.length

    @property
    def spans(self) -> Array:
        """The begin and end [1,n,2] of each sequence among the tokens of this device."""
        ends = (self.cuts - self.first).clip(0, self.length)
        return jnp.stack([ends[:-1], ends[1:]], axis=-1)[None]

    def device_of(self, token: Array) -> Array:
        """The index of the device that has a token."""
        return jnp.clip(token, 0, max(self.size * self.length - 1, 0)) // max(self.length, 1)


class Sequence(NamedTuple):
    """The sequence that contains a token: its index, its begin and end, and whether there is one."""

    number: Array
    first: Array
    after: Array
    exists: Array


def shards_of(name: str, axis_name: Any, cu_seqlens: Any, q: Any, reverse: bool) -> Shards:
    """The shards of a call, where q has the tokens of this device."""
    size, length = axis_size(name, axis_name), q.shape[1]
    require_known(name, "the length of q", length, q=q)
    total = size * length
    cuts = jnp.array([0, total], np.int32) if cu_seqlens is None else int32(array(name, "cu_seqlens", cu_seqlens))
    return Shards(axis_name, size, length, reverse, cuts.clip(0, total))


@dataclass(frozen=True)
class Links:
    """What joins the part of the recurrence on a device to those on the devices before it.

    Attributes:
        shards: the sharding.
        entering, leaving: the sequences of this device's first and of its last token in time.
        goes_on: whether the state of a sequence [1,n,1,1,1] comes from the devices before.
        of_keys, of_values: the sums of log decays over the tokens of `leaving`, as in `Shard`, of all devices, [m,…].
    """

    shards: Shards
    entering: "Sequence"
    leaving: "Sequence"
    goes_on: Array
    of_keys: Array | None
    of_values: Array | None

    def initial_states(self, states: Array) -> Array:
        """The states on entry [b,n,h,d,e], 0 for sequences that begin here, from what all devices make of 0."""
        gathered = Shard(states, self.of_keys, self.of_values)
        state = _entering(self.shards, self.shards.index, self.entering, gathered)
        return jnp.where(self.goes_on, state[:, None], 0)

    def of_leaving(self, final: Array) -> Array:
        """The final state [b,h,d,e] of the sequence of this device's last token in time."""
        return jnp.where(_of_sequence(self.leaving, self.shards), final, 0).sum(1)


jax.tree_util.register_dataclass(
    Links, ["entering", "leaving", "goes_on", "of_keys", "of_values", "shards"], meta_fields=[]
)
jax.tree_util.register_dataclass(Shards, ["cuts"], ["axis_name", "size", "length", "reverse"])


def with_initial_states(shards: Shards, operands: Operands, final: Recurrence) -> tuple[Operands, Links | None]:
    """The operands of this device's part of a recurrence, with `initial_state` the state of each sequence on entry.

    It is the given state for sequences that begin here, and arbitrary for those without tokens here. `final` computes
    final states alone. In a first derivative the states that come from other devices are constant: `linked` adds what
    depends on them.
    """
    operands, index = _varying(operands, shards)
    given = _given(operands)
    operands = operands._replace(initial_state=given)
    if shards.size == 1 or operands.q.size == 0:
        return operands, None
    first, after = index * shards.length, (index + 1) * shards.length
    entering, leaving = (_sequence(shards.cuts, x) for x in ((first, after - 1)[:: -1 if shards.reverse else 1]))
    began_before = entering.after > after if shards.reverse else entering.first < first
    goes_on = _of_sequence(entering, shards) & began_before & entering.exists
    mask = None
    if operands.spans is not None:
        token = first + jnp.arange(shards.length, dtype=np.int32)
        mask = (leaving.first <= token) & (token < leaving.after) & leaving.exists
    links = Links(shards, entering, leaving, goes_on, None, None)
    made = final(operands._replace(initial_state=jnp.where(goes_on, 0, given))).final_state
    gathered = gathered_shards(Shard(links.of_leaving(made), *decays(operands, mask)), shards.axis_name)
    links = replace(links, of_keys=gathered.of_keys, of_values=gathered.of_values)
    states = _constant(links.initial_states(gathered.state))
    return operands._replace(initial_state=jnp.where(goes_on, states, given)), links


@jax.custom_jvp
def _constant(x: Array) -> Array:
    """x, whose tangent is 0; in higher derivatives x varies in the result of the first."""
    return x


@_constant.defjvp
def _constant_jvp(primals, tangents):
    return primals[0], jnp.zeros_like(tangents[0])


def linked(links: Links, operands: Operands, out: Outputs, recurrence: Recurrence) -> Outputs:
    """The results `out` of the recurrence, whose derivatives now pass through the states of other devices."""

    @jax.custom_jvp
    def joined(out, operands, links):
        return out

    def derivative(primals, tangents):
        out, operands, links = primals
        moving = tangents[0]
        states = all_gather(links.of_leaving(moving.final_state)[None], links.shards.axis_name)
        entering = links.initial_states(states)
        of_states = lambda state: recurrence(operands._replace(initial_state=state))
        added = jax.jvp(of_states, (operands.initial_state,), (entering,))[1]
        return out, Outputs(*(x + y for x, y in zip(moving, added, strict=True)))

    joined.defjvp(derivative)
    return joined(out, operands, links)


def final_states(shards: Shards, states: Array) -> Array:
    """The final states [n or b,h,d,e] on every device, each from the device with its sequence's last token in time."""
    owner = shards.device_of(shards.cuts[:-1] if shards.reverse else shards.cuts[1:] - 1)
    is_own = lax.expand_dims(owner == shards.index, (1, 2, 3))
    return lax.psum(jnp.where(is_own, states, 0), shards.axis_name)


# --- Between devices --------------------------------------------------------------------------------------------------


def _entering(shards: Shards, index: Array, entering: Sequence, gathered: Shard) -> Array:
    """The state [b,h,d,e], from the devices before, of the sequence that continues here; 0 if none does."""
    since = shards.device_of(entering.after - 1 if shards.reverse else entering.first)

    def after_device(state, of_device):
        number, shard = of_device
        after, before = (number <= since, number > index) if shards.reverse else (number >= since, number < index)
        # On the device where it begins there is no state yet, and 0·exp(Σ g) may be 0·∞ = NaN.
        passed = after & before & (number != since)
        decayed = state
        if shard.of_keys is not None:
            decayed = decayed * jnp.exp(jnp.where(passed, shard.of_keys, 0))[..., None]
        if shard.of_values is not None:
            decayed = decayed * jnp.exp(jnp.where(passed, shard.of_values, 0))[..., None, :]
        return jnp.where(after & before, decayed + shard.state, state), None

    devices = jnp.arange(shards.size, dtype=np.int32)
    nothing = jnp.zeros_like(gathered.state[0])
    unroll = min(shards.size, 8)
    return lax.scan(after_device, nothing, (devices, gathered), reverse=shards.reverse, unroll=unroll)[0]


# --- Pieces -----------------------------------------------------------------------------------------------------------


def _varying(operands: Operands, shards: Shards) -> tuple[Operands, Array]:
    """The operands and the index of this device, cast to vary over the same manual axes."""
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    varying = vary_alike(given | {"index": shards.index})
    index = varying.pop("index")
    return Operands(**varying), index


def _given(x: Operands) -> Array:
    """The given initial states [b,n,h,d,e], sharded as q is."""
    if x.initial_state is not None:
        return x.initial_state
    of_heads = jnp.zeros_like(x.q, np.promote_types(x.q.dtype, np.float32)).sum(1)
    sequences = 1 if x.spans is None else x.spans.shape[1]
    batch, heads, d = of_heads.shape
    return jnp.broadcast_to(of_heads[:, None, ..., None], (batch, sequences, heads, d, x.v.shape[3]))


def _sequence(cuts: Array, token: Array) -> Sequence:
    """The sequence, never an empty one, that contains a token."""
    found = (cuts <= token).sum(dtype=np.int32) - 1
    number = found.clip(0, cuts.shape[0] - 2)
    return Sequence(number, cuts[number], cuts[number + 1], (found == number) & (token < cuts[-1]))


def _of_sequence(sequence: Sequence, shards: Shards) -> Array:
    """A mask [1,n,1,1,1] that selects the state of the sequence."""
    number = jnp.arange(shards.cuts.shape[0] - 1, dtype=np.int32)
    return lax.expand_dims(number == sequence.number, (0, 2, 3, 4))
