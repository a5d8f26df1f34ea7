"""The layout of a call in the kernels of Mamba's state space: whole chunks of tokens, with channels last.

Each sequence begins a new chunk, and the rest of its last chunk is filled with zeros: dt = 0 leaves the state as it is.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu._recurrence.layout import of_all_sequences, ordered, state_of, unordered
from ejkernel.kernels._pallas.tpu._work_list import largest_block
from ejkernel.primitives.state_space_v1 import Operands
from ejkernel.types.recurrence import RecurrenceConfig

GROUP = 16
"""Tokens that a loop computes in a step: the rows of a register in bfloat16."""


class Plan(NamedTuple):
    """The sizes of a call.

    b, s, h, d: batch, tokens, channels, numbers of the state of a channel. n, packed: sequences, and the batch elements
    for which these are given (0 without sequences). chunk: tokens of a chunk. lanes: channels of a program.
    """

    b: int
    s: int
    h: int
    d: int
    n: int
    packed: int
    chunk: int
    lanes: int
    reverse: bool = False

    @property
    def count(self) -> int:
        """The number of chunks; with packed sequences, the most that there can be."""
        return self.s // self.chunk + self.n if self.packed else pl.cdiv(self.s, self.chunk)

    @property
    def groups(self) -> int:
        """The groups of a chunk."""
        return self.chunk // GROUP

    @property
    def blocks(self) -> int:
        """The programs of a chunk."""
        return self.h // self.lanes

    @property
    def state(self) -> jax.ShapeDtypeStruct:
        """The states of sequences, [b,n,1,d,h]."""
        return jax.ShapeDtypeStruct((self.b, self.n, 1, self.d, self.h), jnp.float32)

    def sequence(self, table: Any, b: Any, i: Any) -> Any:
        """The sequence of a chunk."""
        return table[(b if self.packed > 1 else 0) * self.count + i]


def plan_of(x: Operands, config: RecurrenceConfig) -> Plan:
    (b, s, h), d = x.x.shape, x.A.shape[2]
    packed, n = (0, 1) if x.spans is None else x.spans.shape[:2]
    return Plan(b, s, h, d, n, packed, max(GROUP, config.chunk_size // GROUP * GROUP), largest_block(h, config.block_v))


class Arrays(NamedTuple):
    """The operands in the layout of the kernels, all but x in float32: A [b?,d,h], D [b?,1,h], x and dt [b,tokens,h],
    and B and C by groups of tokens [b,groups,d,GROUP].
    """

    A: Any
    D: Any
    x: Any
    dt: Any
    B: Any
    C: Any


def arrays_of(x: Operands, order: Any, plan: Plan) -> Arrays:
    wide = lambda a: a.astype(jnp.float32)
    tokens = lambda a: ordered(a[:, :, None], order, plan)[:, 0]
    groups = lambda a: tokens(wide(a)).reshape(plan.b, -1, GROUP, plan.d).swapaxes(2, 3)
    D = jnp.zeros((1, plan.h), jnp.float32) if x.D is None else wide(x.D)
    return Arrays(wide(x.A).swapaxes(1, 2), D[:, None], tokens(x.x), tokens(wide(x.dt)), groups(x.B), groups(x.C))


class Specs(NamedTuple):
    """Block specs of a grid of (batch, channels, chunks), from the last chunk to the first with `back`."""

    plan: Plan
    back: bool = False

    def at(self, i: Any) -> Any:
        """The chunk of a step."""
        return self.plan.count - 1 - i if self.back else i

    def of_channels(self, rows: int, batch: int) -> pl.BlockSpec:
        """[b?,rows,h]."""
        index = lambda b, c, i, table: (b if batch > 1 else 0, 0, c)
        return pl.BlockSpec((None, rows, self.plan.lanes), index)

    def of_tokens(self) -> pl.BlockSpec:
        """A chunk of [b,tokens,h]."""
        return pl.BlockSpec((None, self.plan.chunk, self.plan.lanes), lambda b, c, i, table: (b, self.at(i), c))

    def of_groups(self) -> pl.BlockSpec:
        """A chunk of [b,groups,d,GROUP]."""
        plan = self.plan
        return pl.BlockSpec((None, plan.groups, plan.d, GROUP), lambda b, c, i, table: (b, self.at(i), 0, 0))

    def of_parts(self) -> pl.BlockSpec:
        """A chunk of [b,blocks,groups,d,GROUP]."""
        plan = self.plan
        return pl.BlockSpec((None, None, plan.groups, plan.d, GROUP), lambda b, c, i, table: (b, c, self.at(i), 0, 0))

    def of_sequence(self, rows: int) -> pl.BlockSpec:
        """That of a chunk's sequence of [b,n,1,rows,h]."""
        index = lambda b, c, i, table: (b, self.plan.sequence(table, b, self.at(i)), 0, 0, c)
        return pl.BlockSpec((None, None, None, rows, self.plan.lanes), index)

    def of_states(self) -> pl.BlockSpec:
        """A chunk's of [b,count,d,h]."""
        plan = self.plan
        return pl.BlockSpec((None, None, plan.d, plan.lanes), lambda b, c, i, table: (b, self.at(i), 0, c))

    def of_arrays(self, arrays: Arrays) -> Arrays:
        """Those of the operands."""
        plan, tokens, groups = self.plan, self.of_tokens(), self.of_groups()
        of_channels = (self.of_channels(rows, a.shape[0]) for rows, a in ((plan.d, arrays.A), (1, arrays.D)))
        return Arrays(*of_channels, tokens, tokens, groups, groups)


def launch(kernel: Any, name: str, plan: Plan, table: Array, operands: Any, in_specs: Any, outputs: Any, scratch: Any):
    """Runs `kernel(plan, table, *operands, *outputs, *scratch)`; `outputs` are pairs (block spec, shape)."""
    specs, shapes = zip(*outputs, strict=True)
    return pl.pallas_call(
        partial(kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(plan.b, plan.blocks, plan.count),
            in_specs=in_specs,
            out_specs=list(specs),
            scratch_shapes=[pltpu.VMEM((*rows, plan.lanes), jnp.float32) for rows in scratch],
        ),
        out_shape=list(shapes),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name=name,
    )(table, *operands)


def tokens_type(plan: Plan, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((plan.b, plan.count * plan.chunk, plan.h), dtype)


def first_states(state: Array | None, plan: Plan) -> Array:
    """[b,n,h,d] -> [b,n,1,d,h]; zeros for None."""
    return state_of(None if state is None else state[:, :, None], plan)


def final_states(state: Array, before: Array, order: Any) -> Array:
    """[b,n,1,d,h] -> [b,n,h,d]; those of empty sequences are the states `before`."""
    return of_all_sequences(state, before, order)[:, :, 0]


def in_sequence(a: Array, order: Any, plan: Plan) -> Array:
    """[b,tokens,h] -> [b,s,h], 0 for tokens of no sequence."""
    return unordered(a[:, None], order, plan)[:, :, 0]
