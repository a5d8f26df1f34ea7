"""The kernel that rounds q, k and v to e4m3 and transposes v, a tile of queries or a block of keys at a time.

A thread block has the rows of one tile or block and one head: it finds their greatest magnitude, and writes the numbers
in units of a power of two (`unit_of`). So everything is read once. v leaves as [b, heads, features, keys], with its
keys in the order in which the weights lie (quantized.py).
"""

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._inline.registers import e4m3_operand
from .._launch import ROWS, WGMMA, launch, load_vector, shared
from .quantized import E4M3, Scales, greatest_of, scales_of, unit_of

# What the tensor memory accelerator wants the keys of v to be a multiple of.
ALIGNED = 128


def rounded(q: Array, k: Array, v: Array, block_q: int, block: int) -> tuple[tuple[Array, Array, Array], Scales]:
    """q and k, and v as [b, heads, features, keys], in e4m3; scales of tiles of `block_q` queries and of blocks."""
    (B, S, H, D), (_, K, G, V) = q.shape, v.shape
    tiles, blocks = -(-S // block_q), -(-K // block)
    of_tiles, of_blocks = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((B, H, tiles), (B, G, blocks)))
    q8, k8 = (jax.ShapeDtypeStruct(x.shape, E4M3) for x in (q, k))
    v8 = jax.ShapeDtypeStruct((B, G, V, -(-K // ALIGNED) * ALIGNED), E4M3)
    *arrays, q_scales, k_scales, v_scales = launch(
        partial(_kernel, rows=(block_q, block, block), greatest=greatest_of(D)),
        "flash_attention_e4m3",
        ((q, k, v),),
        out_type=(q8, k8, v8, of_tiles, of_blocks, of_blocks),
        blocks=B * (H * tiles + 2 * G * blocks),
        warpgroups=1,
        scratch=dict(
            tiles=plgpu.RefUnion(*(shared(shape, q.dtype) for shape in ((block_q, D), (block, D), (block, V)))),
            results=plgpu.RefUnion(*(shared(shape, E4M3) for shape in ((block_q, D), (block, D), (V, block)))),
            full=plgpu.Barrier(),
        ),
        reduction_bytes=16,
    )
    return tuple(arrays), scales_of(q_scales, k_scales, v_scales)


def _kernel(arrays, q8, k8, v8, *scales, tiles, results, full, rows, greatest):
    number, first = lax.axis_index("block"), 0
    arrays_and_limits = zip(arrays, (q8, k8, v8), scales, tiles, results, rows, greatest, strict=True)
    for x, x8, units, tile, result, length, limit in arrays_and_limits:
        count = np.prod(units.shape)

        def round_block(x=x, x8=x8, units=units, tile=tile, result=result, length=length, limit=limit, first=first):
            _, heads, places = map(jnp.int32, units.shape)
            head, place = lax.div(number - first, places), lax.rem(number - first, places)
            batch, head, part = lax.div(head, heads), lax.rem(head, heads), pl.ds(place * length, length)
            of_v = x8 is v8
            source, target = x.at[batch, part, head], x8.at[batch, head, :, part] if of_v else x8.at[batch, part, head]
            units[batch, head, place] = _round(source, tile, result, target, full, limit, of_v)

        pl.when((number >= first) & (number < first + count))(round_block)
        first += count


def _round(source: Any, tile: Any, result: Any, target: Any, full: Any, limit: float, of_v: bool) -> Array:
    plgpu.copy_gmem_to_smem(source, tile, full)
    plgpu.barrier_wait(full)
    rows = tile.T if of_v else tile
    parts = [pl.ds(first, ROWS) for first in range(0, rows.shape[0], ROWS)]
    numbers = lambda part: load_vector(rows.at[part], WGMMA).astype(jnp.float32)
    unit = unit_of(reduce(jnp.maximum, [jnp.abs(numbers(part)).max(axis=1) for part in parts]).max(), limit)
    for part in parts:
        x = numbers(part) * (1 / unit)
        result[part] = e4m3_operand(x) if of_v else x.astype(E4M3)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(result, target)
    plgpu.wait_smem_to_gmem(0)
    return unit
