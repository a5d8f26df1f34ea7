"""The kernel that rounds k and v to e4m3, a block of keys at a time, and transposes v: each is read once.

A block of threads has the keys of one block and head, of k or of v: it finds their greatest number, which becomes the
greatest of e4m3, and writes what they are in units of that. v leaves as [b, heads, features, keys], with its keys in
the order in which the weights lie (quantized.py).
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._launch import ROWS, WGMMA, launch, load_vector, shared
from .quantized import E4M3, KEYS, Scales, operand, scales_of, unit_of


class Side(NamedTuple):
    """The way of k or of v: from where, by which tile in shared memory, which is read as `view`; rounded, to where."""

    source: Any
    tile: Any
    view: Any
    rounded: Any
    target: Any
    scales: Any
    convert: Callable


def rounded(arrays: tuple[Array, Array, Array], block: int) -> tuple[tuple[Array, Array, Array], Scales]:
    """q as it is, k in e4m3, v in e4m3 as [b, heads, features, keys]; and the scales of blocks of keys."""
    q, k, v = arrays
    B, K, G, D = k.shape
    V, blocks = v.shape[3], -(-K // block)
    of_blocks = jax.ShapeDtypeStruct((B, G, blocks), jnp.float32)
    k, v, of_k, of_v = launch(
        partial(_kernel, block=block),
        "flash_attention_e4m3",
        (k, v),
        out_type=(
            jax.ShapeDtypeStruct(k.shape, E4M3),
            jax.ShapeDtypeStruct((B, G, V, -(-K // KEYS) * KEYS), E4M3),
            of_blocks,
            of_blocks,
        ),
        blocks=2 * B * G * blocks,
        warpgroups=1,
        scratch=dict(
            tiles=plgpu.RefUnion(shared((block, D), k.dtype), shared((block, V), v.dtype)),
            rounded=plgpu.RefUnion(shared((block, D), E4M3), shared((V, block), E4M3)),
            full=plgpu.Barrier(),
        ),
        reduction_bytes=16,
    )
    return (q, k, v), scales_of(of_k, of_v)


def _kernel(k, v, k_rounded, v_rounded, k_scales, v_scales, *, tiles, rounded, full, block: int):
    blocks, heads = k_scales.shape[2], jnp.int32(k.shape[2])
    number = lax.axis_index("block")
    of_v, number = lax.rem(number, jnp.int32(2)), lax.div(number, jnp.int32(2))
    head, place = lax.div(number, jnp.int32(blocks)), lax.rem(number, jnp.int32(blocks))
    batch, head, keys = lax.div(head, heads), lax.rem(head, heads), pl.ds(place * block, block)
    here = batch, keys, head
    sides = (
        Side(k.at[here], tiles[0], tiles[0], rounded[0], k_rounded.at[here], k_scales, lambda x: x.astype(E4M3)),
        Side(v.at[here], tiles[1], tiles[1].T, rounded[1], v_rounded.at[batch, head, :, keys], v_scales, operand),
    )
    lax.cond(of_v == 0, *(partial(_round, side, (batch, head, place), full) for side in sides))


def _round(side: Side, place: tuple, full: Any) -> None:
    plgpu.copy_gmem_to_smem(side.source, side.tile, full)
    plgpu.barrier_wait(full)
    parts = [pl.ds(first, ROWS) for first in range(0, side.view.shape[0], ROWS)]
    numbers = lambda part: load_vector(side.view.at[part], WGMMA).astype(jnp.float32)
    greatest = [jnp.abs(numbers(part)).max(axis=1) for part in parts]
    unit = unit_of(reduce(jnp.maximum, greatest).max())
    for part in parts:
        side.rounded[part] = side.convert(numbers(part) * (1 / unit))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(side.rounded, side.target)
    side.scales[place] = unit
    plgpu.wait_smem_to_gmem(0)
