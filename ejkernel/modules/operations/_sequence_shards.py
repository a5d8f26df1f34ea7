"""The linear recurrence over a sequence that is sharded over devices: the initial state of each device's shard.

The tokens j = 1 … c of a shard, with log decays g, take a state h to

    exp(Σ_l g_l) · h + H,    H = Σ_j exp(Σ_{l>j} g_l) · k_j v_jᵀ

Each device computes H and Σ g of its shard, with one of the two products that the output takes. All devices gather
these, and each applies those of the devices before it, one after the other. The recurrence itself then runs once, from
the right state, so that o is rounded once, as for a sequence on one device.

Each device sends one state for each head, whatever the length. The all-gather of n devices sends n − 1 states from each
device where a scan would send log₂ n, but all at once: with states of a few MB, a step costs more to start than to
send. It is one collective for any number of devices, and its transpose is one reduce-scatter.

At most one packed sequence continues from a device to the next, so a device sends the state of one sequence, that of
its last token in time; all devices know from cu_seqlens on which of them it began.
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
"""The tokens whose decays are in memory at once, in float32, and the tokens of one product; more leave cores idle."""


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


def with_initial_states(shards: Shards, operands: Operands, *, precise: bool) -> Operands:
    """The operands of this device's part of a recurrence, with `initial_state` the state of each sequence on entry.

    It is the given state for sequences that begin here, and arbitrary for those without tokens here. `precise` asks for
    float32 products of 16-bit arrays too, as a final state that is a result needs; o is rounded to 16 bits anyway.
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
    """The final states [n or b,h,d,e] on every device, each from the device with its sequence's last token in time."""
    owner = shards.device_of(shards.cuts[:-1] if shards.reverse else shards.cuts[1:] - 1)
    is_own = lax.expand_dims(owner == shards.index, (1, 2, 3))
    return lax.psum(jnp.where(is_own, states, 0), shards.axis_name)


# --- A shard ----------------------------------------------------------------------------------------------------------


class Shard(NamedTuple):
    """The final state H [b,h,d,e] of a shard, and the sums of its log decays of rows [b,h,d or 1] and columns."""

    state: Array
    of_keys: Array | None
    of_values: Array | None


def _shard(x: Operands, state: Array, of_sequence: Array, *, precision: str, reverse: bool) -> Shard:
    """The update of a state [b,h,d,e] by a shard's last sequence in time; tokens of other sequences have no effect."""
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
    """Sums of log decays over no tokens: zeros, sharded as the state [b,g,r,d,e] is; None for absent decays."""
    of_row = state[..., 0] if x.gk is not None else state[..., 0, :1]
    decays = x.gk is not None or x.g is not None or x.g_gamma is not None
    return jnp.zeros_like(of_row) if decays else None, None if x.gv is None else jnp.zeros_like(state[..., 0, :])


def _chunk(
    gamma: Array | None, blocks: int, precision: str, reverse: bool, carry: Shard, of_chunk: dict[str, Array]
) -> tuple[Shard, None]:
    """The carry after a chunk of tokens [b,c,…]; states are [b,g,r,d,e], r query heads for each key/value head."""
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
    """For each token the sum of the log decays of all later ones in time, without a difference of two sums."""
    zero = jnp.zeros_like(g[:, :1])
    later = (zero, g[:, :-1]) if reverse else (g[:, 1:], zero)
    return lax.cumsum(jnp.concatenate(later, 1), 1, reverse=not reverse)


# --- Between devices --------------------------------------------------------------------------------------------------


def _gathered(shard: Shard, axis_name: Any) -> Shard:
    """The shards of all devices, [n,…], by one collective."""
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
    """The arrays x of all devices, concatenated along the first axis.

    Explicit axes of the mesh, over which x may be split, are made manual here. Beside Explicit axes the transpose, a
    reduce-scatter, has no lowering, and gathering on a new axis would leave their entries one place early in the spec
    (both on jax 0.11.2).
    """
    gather = partial(lax.all_gather, axis_name=axis_name, tiled=True)
    aval = jax.typeof(x)
    if not (explicit := explicit_axes(aval)):
        return gather(x)
    spec = aval.sharding.spec
    return jax.shard_map(gather, in_specs=spec, out_specs=spec, axis_names=set(explicit))(x)


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
