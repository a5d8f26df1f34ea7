"""The layout of a call in the kernels of the linear recurrence: [b,h,tokens,…] in the order of time, in whole chunks.

Each sequence begins a new chunk, and the rest of its last chunk is filled with zeros: a token without key and decay
leaves the state unchanged. A table in scalar memory has the sequence of each chunk. The value features of a head, which
are independent of each other, are cut into parts that fit a program.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ejkernel.primitives._recurrence import Operands, RecurrenceSpec
from ejkernel.types.recurrence import RecurrenceConfig

from .._work_list import largest_block

# The most value features of a part.
MOST_FEATURES = 256


class Plan(NamedTuple):
    """The sizes and options of a call.

    b, h, s: batch, heads of the state, tokens. d, e, part: features of keys, of values, and of a part of the values.
    n, packed: sequences, and the batch elements for which these are given (0 without sequences).
    chunk, block: tokens of a chunk and of a block. normalises: whether q and k are divided by their norms.
    """

    b: int
    h: int
    s: int
    d: int
    e: int
    part: int
    n: int
    packed: int
    chunk: int
    block: int
    scale: float
    reverse: bool
    normalises: bool

    @property
    def count(self) -> int:
        """The number of chunks; with packed sequences, the most that there can be."""
        return self.s // self.chunk + self.n if self.packed else pl.cdiv(self.s, self.chunk)

    @property
    def parts(self) -> int:
        return self.e // self.part

    @property
    def grid(self) -> tuple[int, int, int]:
        """The axes of the grid: batch; parts of heads; chunks."""
        return self.b, self.h * self.parts, self.count

    def sequence(self, table: Any, b: Any, i: Any) -> Any:
        """The sequence of a chunk."""
        return table[(b if self.packed > 1 else 0) * self.count + i]

    def of_keys(self, width: int, heads: int, back: bool = False) -> pl.BlockSpec:
        """A chunk of [b,heads,tokens,width]."""
        # Mosaic lowers `//` only if the device is known.
        at = lambda b, h, i, table: (b, lax.div(h, self.h * self.parts // heads), self._at(i, back), 0)
        return pl.BlockSpec((None, None, self.chunk, width), at)

    def of_values(self, heads: int, back: bool = False) -> pl.BlockSpec:
        """A chunk of [b,heads,tokens,e], with the features of one part."""

        def at(b, h, i, table):
            return b, lax.div(h, self.h * self.parts // heads), self._at(i, back), lax.rem(h, self.parts)

        return pl.BlockSpec((None, None, self.chunk, self.part), at)

    def of_state(self, back: bool = False) -> pl.BlockSpec:
        """The state of a sequence, of [b,n,h,e,d]."""

        def at(b, h, i, table):
            return b, self.sequence(table, b, self._at(i, back)), lax.div(h, self.parts), lax.rem(h, self.parts), 0

        return pl.BlockSpec((None, None, None, self.part, self.d), at)

    def of_states(self, back: bool = False) -> pl.BlockSpec:
        """The initial state of a chunk, of [b,h,count,e,d]."""
        at = lambda b, h, i, table: (b, lax.div(h, self.parts), self._at(i, back), lax.rem(h, self.parts), 0)
        return pl.BlockSpec((None, None, None, self.part, self.d), at)

    def _at(self, i: Any, back: bool) -> Any:
        return self.count - 1 - i if back else i

    def tokens(self, heads: int, width: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.b, heads, self.count * self.chunk, width), dtype)

    @property
    def state(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.b, self.n, self.h, self.e, self.d), jnp.float32)

    @property
    def states(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.b, self.h, self.count, self.e, self.d), jnp.float32)


def plan(x: Operands, spec: RecurrenceSpec, config: RecurrenceConfig, normalises: bool = False) -> Plan:
    """The `Plan` of a call; the heads of the state may share keys, and queries or values."""
    (b, s, _, d), e, h = x.q.shape, x.v.shape[3], max(x.q.shape[2], x.v.shape[2])
    packed, n = (0, 1) if x.spans is None else x.spans.shape[:2]
    part = e if e <= MOST_FEATURES else largest_block(e, MOST_FEATURES)
    size = min(config.subchunk_size, config.chunk_size)
    chunk = config.chunk_size // size * size
    return Plan(b, h, s, d, e, part, n, packed, chunk, size, spec.softmax_scale, spec.reverse, normalises)


def first_and_last(plan: Any, table: Any, back: bool = False) -> tuple[Any, Any]:
    """Whether the chunk is the first, and the last, of its sequence in the order of the grid."""
    b, i = pl.program_id(0), pl.program_id(2)
    sequence = lambda i: plan.sequence(table, b, plan.count - 1 - i if back else i)
    is_first = (i == 0) | (sequence(i) != sequence(jnp.maximum(i - 1, 0)))
    is_last = (i == plan.count - 1) | (sequence(i) != sequence(jnp.minimum(i + 1, plan.count - 1)))
    return is_first, is_last


class Order(NamedTuple):
    """The assignment of chunks to sequences, and of tokens to chunks; all but `table` are None without sequences.

    table: [b?·count] the sequence of each chunk.
    source: [b?,tokens] the index of the token at each place in the chunks, out of range for none.
    place: [b?,s] the place of each token in the chunks, out of range for a token of no sequence.
    empty: [b?,n] whether a sequence has no tokens.
    """

    table: Array
    source: Array | None = None
    place: Array | None = None
    empty: Array | None = None


def order_of(x: Operands, plan: Plan) -> Order:
    if x.spans is None:
        return Order(jnp.zeros(plan.count, jnp.int32))
    order = jax.vmap(lambda spans: _order_of_sequences(spans, plan))(x.spans)
    return order._replace(table=order.table.reshape(-1))


def _order_of_sequences(spans: Array, plan: Plan) -> Order:
    """The `Order` of sequences given as spans [n,2]; unused chunks belong to the last sequence and hold no tokens."""
    start, end = spans[:, 0], jnp.maximum(spans[:, 1], spans[:, 0])
    chunks = -(-(end - start) // plan.chunk)
    after = jnp.cumsum(chunks, dtype=jnp.int32)
    chunk = jnp.arange(plan.count, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(after, chunk, side="right").astype(jnp.int32), plan.n - 1)
    since = ((chunk - (after - chunks)[sequence]) * plan.chunk)[:, None] + jnp.arange(plan.chunk, dtype=jnp.int32)
    begin, stop = start[sequence][:, None], end[sequence][:, None]
    source = stop - 1 - since if plan.reverse else begin + since
    source = jnp.where(since < stop - begin, source, plan.s).reshape(-1)
    place = jnp.full(plan.s, plan.count * plan.chunk, jnp.int32)
    place = place.at[source].set(jnp.arange(source.size, dtype=jnp.int32), mode="drop")
    return Order(sequence, source, place, start == end)


def ordered(a: Array, order: Order, plan: Plan) -> Array:
    """Brings heads before tokens, [b,s,h,…] -> [b,h,tokens,…]."""
    if order.source is None:
        a = lax.rev(a, (1,)) if plan.reverse else a
        a = jnp.pad(a, [(0, plan.count * plan.chunk - n if i == 1 else 0) for i, n in enumerate(a.shape)])
    else:
        a = _taken(a, order.source)
    return a.transpose(0, 2, 1, 3)


def unordered(a: Array, order: Order, plan: Plan) -> Array:
    """[b,h,tokens,…] -> [b,s,h,…], 0 for tokens of no sequence."""
    a = a.transpose(0, 2, 1, 3)
    if order.place is not None:
        return _taken(a, order.place)
    a = a[:, : plan.s]
    return lax.rev(a, (1,)) if plan.reverse else a


def _taken(a: Array, indices: Array) -> Array:
    """a[b, indices[b?,i]] at [b,i,…], 0 for indices past the end."""
    take = lambda a, i: a.at[i].get(mode="fill", fill_value=0)
    shared = indices.shape[0] < a.shape[0]
    return jax.vmap(take, (0, None))(a, indices[0]) if shared else jax.vmap(take)(a, indices)


def state_of(state: Array | None, plan: Plan) -> Array:
    """[b,n,h,d,e] -> [b,n,h,e,d]; zeros for None."""
    return jnp.zeros(plan.state.shape, jnp.float32) if state is None else state.astype(jnp.float32).swapaxes(3, 4)


def of_all_sequences(state: Array, before: Array, order: Order) -> Array:
    """The final states [b,n,h,e,d] -> [b,n,h,d,e]; those of empty sequences are the states `before`."""
    if order.empty is not None:
        state = jnp.where(order.empty[:, :, None, None, None], before, state)
    return state.swapaxes(3, 4)
