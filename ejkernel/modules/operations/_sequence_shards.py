"""A linear recurrence over a sequence that is sharded over devices: the state in which the shard of each begins.

From a state h the tokens j = 1 … c of a shard, with log decays g, lead to

    exp(Σ_l g_l) · h + H,    H = Σ_j exp(Σ_{l>j} g_l) · k_j v_jᵀ

A device computes H and Σ g of its shard, which takes one product of the two that an output takes; these are gathered
from all devices, and each applies those before it, one after the other. The recurrence itself then runs once, from the
right state: o is rounded once, as of a sequence on one device.

What is sent does not depend on the length, a state for each head. Gathering sends n − 1 of them from each device where
a scan would send log₂ n, but at once: with states of some MB each step costs more to start than to send. It is also one
collective for any number of devices, whose transpose is one reduce-scatter.

At most one of packed sequences goes on from a device to the next, so what is sent is the state of one sequence, that of
the last token in time; all devices know from cu_seqlens on which of them it began.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...primitives._recurrence import Operands
from ...primitives._sharding import explicit_axes
from ._arguments import array, axis_size, int32, require_known, vary_alike

_CHUNK, _BLOCK = 4096, 256
"""Tokens whose decays are held at once, in float32, and those that a product sums over: with more, cores are idle."""


@dataclass(frozen=True)
class Shards:
    """How a sequence, or several that are packed, are sharded over a mesh axis.

    Attributes:
        axis_name: the axis, or axes.
        size: the number of devices.
        length: the tokens of each.
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
        """The number of this device."""
        return lax.axis_index(self.axis_name)

    @property
    def first(self) -> Array:
        """The first token of this device."""
        return self.index * self.length

    @property
    def spans(self) -> Array:
        """[1,n,2]: where each sequence begins and ends among the tokens of this device."""
        ends = (self.cuts - self.first).clip(0, self.length)
        return jnp.stack([ends[:-1], ends[1:]], axis=-1)[None]

    def device_of(self, token: Array) -> Array:
        """The device that has a token."""
        return jnp.clip(token, 0, max(self.size * self.length - 1, 0)) // max(self.length, 1)


class Sequence(NamedTuple):
    """The sequence that has a token: its number, where it begins and ends, and whether there is one."""

    number: Array
    first: Array
    after: Array
    exists: Array


def shards_of(name: str, axis_name: Any, cu_seqlens: Any, q: Any, reverse: bool) -> Shards:
    """The shards of a call whose q is that of this device."""
    size, length = axis_size(name, axis_name), q.shape[1]
    require_known(name, "the length of q", length, q=q)
    total = size * length
    cuts = jnp.array([0, total], np.int32) if cu_seqlens is None else int32(array(name, "cu_seqlens", cu_seqlens))
    return Shards(axis_name, size, length, reverse, cuts.clip(0, total))


def with_initial_states(shards: Shards, operands: Operands, *, precise: bool) -> Operands:
    """The operands of this device's part of a recurrence: `initial_state` is that in which each sequence begins here.

    It is the one given where a sequence has not begun before, and anything where it has no tokens here. `precise` asks
    for float32 products of 16 bits too, for a final state that is a result; o alone is rounded to 16 bits anyway.
    """
    operands, index = _varying(operands, shards)
    given = _given(operands)
    if shards.size == 1 or operands.q.size == 0:
        return operands._replace(initial_state=given)
    first, after = index * shards.length, (index + 1) * shards.length
    entering, leaving = (_sequence(shards.cuts, x) for x in ((first, after - 1)[:: -1 if shards.reverse else 1]))
    begins_here = leaving.after <= after if shards.reverse else leaving.first >= first
    state = jnp.where(_of_sequence(leaving, shards) & begins_here, given, 0).sum(1)
    token = first + jnp.arange(shards.length, dtype=np.int32)
    mask = (leaving.first <= token) & (token < leaving.after) & leaving.exists
    precision = "highest" if precise or operands.k.dtype.itemsize > 2 else "high"
    shard = jax.checkpoint(partial(_shard, precision=precision, reverse=shards.reverse))(operands, state, mask)
    state = _entering(shards, index, entering, _gathered(shard, shards.axis_name))
    began_before = entering.after > after if shards.reverse else entering.first < first
    goes_on = _of_sequence(entering, shards) & began_before & entering.exists
    return operands._replace(initial_state=jnp.where(goes_on, state[:, None], given))


def final_states(shards: Shards, states: Array) -> Array:
    """[n or b,h,d,e], the same on each device: each from the one that has the last token of its sequence in time."""
    owner = shards.device_of(shards.cuts[:-1] if shards.reverse else shards.cuts[1:] - 1)
    is_own = lax.expand_dims(owner == shards.index, (1, 2, 3))
    return lax.psum(jnp.where(is_own, states, 0), shards.axis_name)


# --- A shard ----------------------------------------------------------------------------------------------------------


class Shard(NamedTuple):
    """The state H [b,h,d,e] in which a shard ends, and the sums of its log decays of rows [b,h,d or 1] and columns."""

    state: Array
    of_keys: Array | None
    of_values: Array | None


def _shard(x: Operands, state: Array, of_sequence: Array, *, precision: str, reverse: bool) -> Shard:
    """What tokens of one sequence, the last in time, make of a state [b,h,d,e]; the others are as if they were not."""
    (batch, length, groups), heads = x.k.shape[:3], x.q.shape[2]
    of_groups = lambda a: a.reshape(*a.shape[:2], groups, heads // groups, *a.shape[3:])
    tokens = dict(k=x.k, v=x.v, mask=of_sequence[None])
    tokens |= {name: of_groups(a) for name in ("g", "gk", "gv") if (a := getattr(x, name)) is not None}
    gamma = None if x.g_gamma is None else x.g_gamma.reshape(x.g_gamma.shape[0], groups, heads // groups)
    state = state.reshape(batch, groups, heads // groups, *state.shape[2:])
    carry = Shard(state, *_no_decay(x, state))
    if length:
        chunks = -(-length // _CHUNK)
        blocks = -(-length // (chunks * _BLOCK))
        size = -(-length // (chunks * blocks)) * blocks
        pad = lambda a: jnp.pad(a, [(0, chunks * size - length if axis == 1 else 0) for axis in range(a.ndim)])
        cut = lambda a: jnp.moveaxis(pad(a).reshape(a.shape[0], chunks, size, *a.shape[2:]), 1, 0)
        chunk = jax.checkpoint(partial(_chunk, gamma, blocks, precision, reverse))
        carry, _ = lax.scan(chunk, carry, jax.tree.map(cut, tokens), reverse=reverse)
    return Shard(*(None if a is None else a.reshape(batch, heads, *a.shape[3:]) for a in carry))


def _no_decay(x: Operands, state: Array) -> tuple[Array | None, Array | None]:
    """The sums of the log decays of no token, sharded as the state [b,g,r,d,e] is."""
    of_row = state[..., 0] if x.gk is not None else state[..., 0, :1]
    decays = x.gk is not None or x.g is not None or x.g_gamma is not None
    return jnp.zeros_like(of_row) if decays else None, None if x.gv is None else jnp.zeros_like(state[..., 0, :])


def _chunk(
    gamma: Array | None, blocks: int, precision: str, reverse: bool, carry: Shard, of_chunk: dict[str, Array]
) -> tuple[Shard, None]:
    """The carry after some tokens [b,c,…]; states are [b,g,r,d,e], r query heads for each of g key/value heads."""
    dtype, mask = carry.state.dtype, of_chunk["mask"]
    tokens = {name: a for name, a in of_chunk.items() if name != "mask"}
    shown = {n: jnp.where(lax.expand_dims(mask, range(2, a.ndim)), a, 0).astype(dtype) for n, a in tokens.items()}
    k, v, gk, gv = shown["k"][:, :, :, None], shown["v"], shown.get("gk"), shown.get("gv")
    g = shown.get("g")
    if gamma is not None:
        of_token = jnp.where(mask[..., None, None], gamma[:, None], 0)
        g = of_token if g is None else g + of_token
    if g is not None:
        gk = g[..., None] if gk is None else gk + g[..., None]
    state, of_keys, of_values = carry
    if gk is not None:
        k, total = k * jnp.exp(_later(gk, reverse)), gk.sum(1)
        state, of_keys = state * jnp.exp(total)[..., None], of_keys + total
    if gv is not None:
        v, total = v[:, :, :, None] * jnp.exp(_later(gv, reverse)), gv.sum(1)
        state, of_values = state * jnp.exp(total)[..., None, :], of_values + total
        k = jnp.broadcast_to(k, (*v.shape[:4], k.shape[-1]))
    k, v = (a.reshape(a.shape[0], blocks, -1, *a.shape[2:]) for a in (k, v))
    axes = "bnsgrd,bnsge->bngrde" if gv is None else "bnsgrd,bnsgre->bngrde"
    added = jnp.einsum(axes, k, v, precision=precision).sum(1)
    return Shard(state + added, of_keys, of_values), None


def _later(g: Array, reverse: bool) -> Array:
    """The sum of the log decays of all tokens that come after each in time: a sum of its own, no difference of two."""
    zero = jnp.zeros_like(g[:, :1])
    later = (zero, g[:, :-1]) if reverse else (g[:, 1:], zero)
    return lax.cumsum(jnp.concatenate(later, 1), 1, reverse=not reverse)


# --- Between devices --------------------------------------------------------------------------------------------------


def _gathered(shard: Shard, axis_name: Any) -> Shard:
    """Those of all devices, [n,…], by one collective."""
    state, *sums = shard
    parts = [state.reshape(*state.shape[:2], -1), *(a for a in sums if a is not None)]
    ends = np.cumsum([a.shape[2] for a in parts])[:-1]
    gathered = _all_gather(jnp.concatenate(parts, 2)[None], axis_name)
    state_of_each, *of_each = jnp.split(gathered, ends, axis=3)
    rest = iter(of_each)
    return Shard(
        state_of_each.reshape(state_of_each.shape[0], *state.shape), *(None if a is None else next(rest) for a in sums)
    )


def _all_gather(x: Array, axis_name: Any) -> Array:
    """Those of all devices, one after the other on the first axis.

    Explicit axes of the mesh, over which x may be split, are made manual: the transpose, a reduce-scatter, has no
    lowering beside them, and gathered on a new axis they would stay at the places before it (both on jax 0.11.2).
    """
    gather = partial(lax.all_gather, axis_name=axis_name, tiled=True)
    aval = jax.typeof(x)
    if not (explicit := explicit_axes(aval)):
        return gather(x)
    spec = aval.sharding.spec
    return jax.shard_map(gather, in_specs=spec, out_specs=spec, axis_names=set(explicit))(x)


def _entering(shards: Shards, index: Array, entering: Sequence, gathered: Shard) -> Array:
    """[b,h,d,e]: the state that the devices before have made of the sequence that goes on here; 0 if none does."""
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
    """Operands and the number of this device, which vary over the same manual axes."""
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    varying = vary_alike(given | {"index": shards.index})
    index = varying.pop("index")
    return Operands(**varying), index


def _given(x: Operands) -> Array:
    """[b,n,h,d,e]: the states in which sequences begin, sharded as q is."""
    if x.initial_state is not None:
        return x.initial_state
    of_heads = jnp.zeros_like(x.q, np.promote_types(x.q.dtype, np.float32)).sum(1)
    sequences = 1 if x.spans is None else x.spans.shape[1]
    batch, heads, d = of_heads.shape
    return jnp.broadcast_to(of_heads[:, None, ..., None], (batch, sequences, heads, d, x.v.shape[3]))


def _sequence(cuts: Array, token: Array) -> Sequence:
    """The sequence that has a token, which is not empty."""
    found = (cuts <= token).sum(dtype=np.int32) - 1
    number = found.clip(0, cuts.shape[0] - 2)
    return Sequence(number, cuts[number], cuts[number + 1], (found == number) & (token < cuts[-1]))


def _of_sequence(sequence: Sequence, shards: Shards) -> Array:
    """[1,n,1,1,1]: which state is that of the sequence."""
    number = jnp.arange(shards.cuts.shape[0] - 1, dtype=np.int32)
    return lax.expand_dims(number == sequence.number, (0, 2, 3, 4))
