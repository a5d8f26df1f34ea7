"""Writes a step's keys and values, quantised by XLA, into the pools in place.

A slot is one lane of a page, which no copy can write alone. So a step of the grid reads a piece of a page of each pool,
replaces the lanes of the step's tokens, and writes it back. The new bytes have their tokens in lanes, too: those of
a piece are in two neighbouring blocks of 128 tokens, which are rotated until each token is in the lane of its slot.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._xla._pages import over_batch
from ejkernel.kernels._xla._turboquant import matrices_of
from ejkernel.xla_utils.turboquant import Quantised, quantise

from .._paged import LANES
from .._paged.ragged import Step
from ..flash_attention.launch import VMEM_BYTES


class Piece(NamedTuple):
    """The fields of a step of the grid.

    Attributes:
        piece: the piece of the pool, by its number among those of all pages; those of a step are in ascending order.
        token: the new token, counted from the first, whose place would be the first lane of the piece.
        first, stop: the lanes first ≤ n < stop with new tokens.
    """

    piece: Any
    token: Any
    first: Any
    stop: Any


def most_pieces(tokens: int, sequences: int) -> int:
    """The most pieces that the tokens of some sequences can be in."""
    return min(tokens, -(-tokens // LANES) + 2 * sequences)


def write(x: Any, pools: Quantised, step: Step, name: str) -> Quantised:
    """The pools, as `pool.stored` gives them, with the quantised x.k and x.v [b,t,g,d] in the slots of their tokens."""
    size = x.value_norms_pages.shape[2]
    new = over_batch(lambda of: quantise(*of), (x.k, x.v, matrices_of(x)))
    of_bytes, norms = _in_lanes(new)
    pieces = jnp.concatenate(_pieces(x, step))
    count = pieces.shape[0] // len(Piece._fields)
    block_of = lambda n: lambda i, pieces: (lax.div(_piece_at(pieces, i).token, LANES) + n, 0, 0, 0)
    of_new = lambda a: [pl.BlockSpec((None, *a.shape[1:]), block_of(n)) for n in (0, 1)]

    def of_pool(pool: Array) -> pl.BlockSpec:
        """The piece of a step; pages have `size` slots, which are the last axis."""
        of_page, between = size // LANES, [0] * (pool.ndim - 2)

        def place(i, pieces):
            piece = _piece_at(pieces, i).piece
            return lax.div(piece, of_page), *between, lax.rem(piece, of_page)

        return pl.BlockSpec((None, *pool.shape[1:-1], LANES), place)

    specs = [of_pool(pool) for pool in pools]
    operands = [of_bytes, of_bytes, norms, norms, *pools]
    return Quantised(
        *pl.pallas_call(
            _kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(count,),
                in_specs=[*of_new(of_bytes), *of_new(norms), *specs],
                out_specs=specs,
            ),
            out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
            input_output_aliases={5 + n: n for n in range(len(pools))},
            compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
            name=name,
        )(pieces, *operands)
    )


def _in_lanes(new: Quantised) -> tuple[Array, Array]:
    """New bytes, four in a word, and norms, [blocks,g,·,128] int32 and [blocks,3,g,128] float32, tokens in lanes.

    There are blocks enough for 127 lanes before the first token, and for the block after that of any token.
    """
    in_bytes = jnp.concatenate([new.key_indices, new.key_signs, new.value_indices], -1)
    words = lax.bitcast_convert_type(in_bytes.reshape(*in_bytes.shape[:-1], -1, 4), jnp.int32)
    norms = jnp.stack([new.key_norms[..., 0], new.key_norms[..., 1], new.value_norms], 2)

    def in_lanes(a: Array) -> Array:
        a = a.reshape(-1, *a.shape[2:])
        a = jnp.pad(a, ((LANES, 2 * LANES - a.shape[0] % LANES), *[(0, 0)] * (a.ndim - 1)))
        return jnp.moveaxis(a.reshape(-1, LANES, *a.shape[1:]), 1, -1)

    return in_lanes(words), in_lanes(norms.astype(jnp.float32))


def _pieces(x: Any, step: Step) -> Piece:
    """The pieces of pages that the step's tokens are written to, each field as int32 [n].

    Pieces that two sequences share follow one another. Unused steps of the grid repeat the last piece, without tokens.
    """
    (b, t), (_, n, columns) = step.position.shape, x.block_tables.shape
    pages, size = x.value_norms_pages.shape[1:3]
    of_page, batch = size // LANES, jnp.arange(b, dtype=jnp.int32)[:, None]
    position = jnp.where(step.valid, step.position, 0)
    column, lane = position // size, position % LANES
    page = x.block_tables[batch, step.sequence, jnp.minimum(column, columns - 1)]
    written = step.valid & (column < columns) & (page >= 0) & (page < pages)
    piece = (batch * pages + page) * of_page + position % size // LANES
    token = jnp.arange(t, dtype=jnp.int32)[None]
    ends = jnp.take_along_axis(step.ends, step.sequence, 1)
    is_first = written & ((lane == 0) | (token == jnp.take_along_axis(step.starts, step.sequence, 1)) | (position == 0))
    unused = b * pages * of_page
    order = jnp.argsort(jnp.where(is_first, piece, unused).reshape(-1), stable=True)[: b * most_pieces(t, n)]
    is_used = is_first.reshape(-1)[order]
    at = lambda a: a.reshape(-1)[order]
    length = jnp.minimum(at(ends - token), LANES - at(lane))
    last = jnp.max(jnp.where(is_used, at(piece), 0))
    # A token is counted from the padding before the first one, so that this number is not negative.
    begin = at(token + batch * t) - at(lane) + LANES
    fields = Piece(
        jnp.where(is_used, at(piece), last),
        jnp.where(is_used, begin, 0),
        jnp.where(is_used, at(lane), 0),
        jnp.where(is_used, at(lane) + length, 0),
    )
    return Piece(*(field.astype(jnp.int32) for field in fields))


def _piece_at(pieces: Any, step: Any) -> Piece:
    """The fields of a step of the grid, from an array, or a ref in the kernel."""
    count = pieces.shape[0] // len(Piece._fields)
    return Piece(*(pieces[field * count + step] for field in range(len(Piece._fields))))


def _kernel(pieces, bytes_before, bytes_after, norms_before, norms_after, *refs):
    """Writes the lanes of one piece; what an earlier step wrote to the same piece is still in vector memory."""
    pools, out = Quantised(*refs[: len(refs) // 2]), Quantised(*refs[len(refs) // 2 :])
    number = pl.program_id(0)
    piece = _piece_at(pieces, number)

    @pl.when((number == 0) | (piece.piece != _piece_at(pieces, jnp.maximum(number - 1, 0)).piece))
    def _():
        for before, after in zip(pools, out, strict=True):
            after[...] = before[...]

    in_slots = partial(_in_slots, shift=lax.rem(piece.token, LANES))
    chosen = lambda shape: _between(lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1), piece.first, piece.stop)

    @pl.when(piece.stop > piece.first)
    def _():
        for g in range(bytes_before.shape[0]):
            words, begin = in_slots(bytes_before[g], bytes_after[g]), 0
            for into in (out.key_indices, out.key_signs, out.value_indices):
                stop = begin + into.shape[1] // 4
                old = pltpu.bitcast(into[g], jnp.int32)
                into[g] = pltpu.bitcast(jnp.where(chosen(old.shape), words[begin:stop], old), into.dtype)
                begin = stop
        of_norm = [in_slots(norms_before[n], norms_after[n]) for n in range(3)]
        put = lambda new, old: jnp.where(chosen(old.shape), new, old.astype(jnp.float32)).astype(old.dtype)
        out.value_norms[...] = put(of_norm[2], out.value_norms[...])
        for g in range(bytes_before.shape[0]):
            both = jnp.concatenate([of_norm[0][g : g + 1], of_norm[1][g : g + 1]])
            out.key_norms[g] = put(both, out.key_norms[g])


def _in_slots(before: Array, after: Array, shift: Any) -> Array:
    """128 lanes of two neighbouring blocks [n,128], from lane `shift` of the first one on."""
    lane = lax.broadcasted_iota(jnp.int32, before.shape, 1)
    rolled = [pltpu.roll(a, lax.rem(LANES - shift, LANES), 1) for a in (before, after)]
    return jnp.where(lane < LANES - shift, *rolled)


def _between(lane: Array, first: Any, stop: Any) -> Array:
    return (lane >= first) & (lane < stop)
