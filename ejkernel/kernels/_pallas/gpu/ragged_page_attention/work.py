"""The work tiles of a step, made on the device from its lengths; each has some tokens of one sequence.

Sequences with few tokens are left to the decoding kernel. Of the rest, sequence n with q_n tokens has ⌈q_n / block_q⌉
work tiles, at most T / block_q + N of all. Tokens of no sequence, before the first and after the last, are two
sequences more whose tokens are placed before every key, and so get o = 0 and lse = −∞: every token is written.

The longest sequences come first, and of each the last tokens, so that thread blocks that take tiles one after the other
end at about the same time, and those at work together read the keys of the same sequence from the L2 cache. Decodes, if
they have tiles, come after the prefills.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._paged import power_of_two
from ejkernel.kernels._triton._paged.work_tiles import MOST_AT_ONCE, TILES_AT_ONCE, TileSchedule, work_tiles_kernel
from ejkernel.types import KernelConfig


class WorkTile(NamedTuple):
    """Tokens of one sequence, int32, as the last axis of the table has them.

    Attributes:
        token: the first, counted over all batches.
        tokens: how many.
        position: where the first stands among the keys; negative before all of them.
        sequence: counted over all batches, whose row of the block tables is read.
        first_key, stop: keys first_key ≤ j < stop may be seen by some token of the step; others may hold anything.
    """

    token: Array
    tokens: Array
    position: Array
    sequence: Array
    first_key: Array
    stop: Array


def most_tiles(batches: int, sequences: int, tokens: int, block_q: int) -> int:
    """The length of the table: an upper bound of the number of work tiles, whatever the lengths are."""
    return batches * (tokens // block_q + sequences + 2)


def work_tiles(
    context_lens: Array, query_start_loc: Array, num_seqs: Array, tokens: int, block_q: int, least: int,
    left: int | None, keys: int, most_keys: int = 0, least_decodes: int = 0, of_step: Array | None = None,
) -> tuple[Array, Array, Array | None]:  # fmt: skip
    """The table [most_tiles, 6], how many of its entries are work tiles [1], and up to how many keys decodes have some,
    [1] or None. Entries behind the work tiles hold anything.

    Of context_lens [b,n], query_start_loc [b,n + 1] and num_seqs [b,1]. A sequence of less than `least` tokens is a
    decode, which has tiles only if it is one of `least_decodes` or more of up to `most_keys` keys. A token sees `left`
    keys before its own, and a sequence has `keys` slots. Of its tokens in the step so many count as keys as `of_step`
    [b,n] says, or all.
    """
    batches, sequences = context_lens.shape
    most, every = most_tiles(batches, sequences, tokens, block_q), batches * (sequences + 2)
    of = jax.ShapeDtypeStruct
    count = of((1,), jnp.int32)
    found = _launch.launch(
        work_tiles_kernel, context_lens, query_start_loc, num_seqs, of_step,
        out_type=(of((most, len(WorkTile._fields)), jnp.int32), count, *([count] if most_keys else [])),
        grid=every + 1,
        config=KernelConfig(num_warps=4, num_stages=1),
        schedule=TileSchedule(batches, sequences, tokens, block_q, least, left, keys, most, most_keys, least_decodes),
        SEQUENCES=min(MOST_AT_ONCE, power_of_two(every)), TILES=TILES_AT_ONCE,
        **({} if most_keys else dict(tiled_keys=None)),
    )  # fmt: skip
    return *found, *([] if most_keys else [None])
