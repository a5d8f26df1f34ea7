"""The common call of all kernels: a grid over records, each with some of the entries of one list.

Each major block has a list of minor blocks: a tile of queries lists slots, or a slot lists tiles. Lists are cut into
records of a bounded number of entries, at least one for each major block. The records of a major block are consecutive,
so that its sums stay in vector memory. While the entries of a record are computed, the blocks of the next one are
copied to the other of two buffers. XLA computes the records; a kernel has the table of their major blocks in scalar
memory, and the entries of a record are copied there for its step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..flash_attention.launch import VMEM_BYTES
from .configs import LANES

BUFFERS = 2
# The low bits of a word of the table are the number of entries of the record, the others its major block.
COUNT_BITS = 7
FIELDS = 4


class Records(NamedTuple):
    """The records of a kernel.

    Attributes:
        table: [n + 1] int32: major block and number of entries.
        entries: [n + 1, 1, fields · most, padded to whole lanes] int32: for each entry the number of its minor block,
            the queries that list it as bits, the first token of the slot, and how many of its keys are visible.
        count: the number of records, at most n.
        most: the most entries of a record.
    """

    table: Array
    entries: Array
    count: Array
    most: int


class Entry(NamedTuple):
    """The fields of one entry, in a kernel."""

    minor: Any
    members: Any
    begin: Any
    keys: Any


class Record(NamedTuple):
    """A record, in a kernel: its major block, its number of entries, and whether it begins or ends a list."""

    major: Any
    count: Any
    is_first: Any
    is_last: Any
    entry: Callable[[Any], Entry]


def records_of(first: Array, count: Array, fields: Sequence[Array], most: int, total: int) -> Records:
    """The records, at most `total`, of m lists that begin at `first` [m] in the fields and have `count` [m] entries."""
    needed = jnp.maximum(-(-count // most), 1)
    after = jnp.cumsum(needed, dtype=jnp.int32)
    record = jnp.arange(total + 1, dtype=jnp.int32)
    used = jnp.minimum(record, after[-1] - 1)
    major = jnp.searchsorted(after, used, side="right").astype(jnp.int32)
    place = (used - (after - needed)[major]) * most
    number = jnp.where(record < after[-1], jnp.clip(count[major] - place, 0, most), 0)
    entry = jnp.arange(most, dtype=jnp.int32)
    at = (first[major] + place)[:, None] + entry
    entries = [jnp.where(entry < number[:, None], field.at[at].get(mode="clip"), 0) for field in fields]
    entries = jnp.concatenate(entries, axis=1)[:, None]
    entries = jnp.pad(entries, ((0, 0), (0, 0), (0, -entries.shape[2] % LANES)))
    return Records(major << COUNT_BITS | number, entries, after[-1], most)


def over_records(
    kernel: Callable[..., None],
    name: str,
    records: Records,
    majors: Any,
    minors: Sequence[Array],
    outputs: Any,
    scratch: Any,
) -> Any:
    """Runs `kernel(record, majors, blocks of minors, outputs, scratch)` for each record.

    Args:
        kernel: gets the major block of each array, and of each minor array the blocks [most, …] of the entries.
        name: the name of the kernel.
        records: the records of all lists.
        majors: arrays [majors, …], any structure.
        minors: arrays [minors, …].
        outputs: shapes [majors, …], any structure.
        scratch: memory that the records of a list share.
    """
    of_major = lambda a: pl.BlockSpec(
        (None, *a.shape[1:]), lambda i, table: (table[i] >> COUNT_BITS, *[0] * (a.ndim - 1))
    )
    width = records.entries.shape[2]
    of_record = lambda ahead: pl.BlockSpec((None, 1, width), lambda i, _: (i + ahead, 0, 0), memory_space=pltpu.SMEM)
    return pl.pallas_call(
        partial(_kernel, kernel, records.most),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(records.count,),
            in_specs=[
                of_record(0),
                of_record(1),
                jax.tree.map(of_major, majors),
                [pl.BlockSpec(memory_space=pl.ANY) for _ in minors],
            ],
            out_specs=[jax.tree.map(of_major, outputs)],
            scratch_shapes=[
                scratch,
                [pltpu.VMEM((BUFFERS, records.most, *a.shape[1:]), a.dtype) for a in minors],
                pltpu.SemaphoreType.DMA((len(minors), BUFFERS)),
            ],
        ),
        out_shape=[outputs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        name=name,
    )(records.table, records.entries, records.entries, majors, list(minors))[0]


def _kernel(kernel, most: int, table, entries, next_entries, majors, minors, outputs, scratch, buffers, semaphores):
    step, steps = pl.program_id(0), pl.num_programs(0)
    entry = lambda of, n: Entry(*(of[0, field * most + n] for field in range(FIELDS)))

    def for_copies(step, of, act: Callable):
        slot = lax.rem(step, BUFFERS)

        def of_entry(n, carry):
            for number, (array, buffer) in enumerate(zip(minors, buffers, strict=True)):
                source = array.at[entry(of, n).minor]
                act(pltpu.make_async_copy(source, buffer.at[slot, n], semaphores.at[number, slot]))
            return carry

        lax.fori_loop(0, _count(table[step]), of_entry, 0)

    @pl.when(step == 0)
    def _():
        for_copies(step, entries, lambda copy: copy.start())

    @pl.when(step + 1 < steps)
    def _():
        for_copies(step + 1, next_entries, lambda copy: copy.start())

    for_copies(step, entries, lambda copy: copy.wait())
    major = lambda step: table[step] >> COUNT_BITS
    record = Record(
        major(step),
        _count(table[step]),
        (step == 0) | (major(jnp.maximum(step - 1, 0)) != major(step)),
        (step == steps - 1) | (major(step + 1) != major(step)),
        partial(entry, entries),
    )
    slot = lax.rem(step, BUFFERS)
    kernel(record, majors, [buffer.at[slot] for buffer in buffers], outputs, scratch)


def _count(word):
    return word & (1 << COUNT_BITS) - 1


def for_chunks(record: Record, size: int, compute: Callable[[Any], None]) -> None:
    """Runs `compute(first)` for the entries of a record, `size` of them at a time."""

    def of_chunk(n, carry):
        compute(n * size)
        return carry

    lax.fori_loop(0, lax.div(record.count + (size - 1), size), of_chunk, 0)


def zero_from(ref: Any, n: Any, rows: Any) -> None:
    """Sets the rows of block n from `rows` on to zero, as they may hold NaN."""
    size = ref.shape[1]

    @pl.when(rows < size)
    def _():
        row = lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        ref[n] = jnp.where(row < rows, ref[n].astype(jnp.float32), 0).astype(ref.dtype)
