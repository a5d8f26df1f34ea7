"""Finds the fully masked tokens, which may hold NaN, and sets them to zero before they are multiplied.

This is needed only if more than the block mask and the band hides pairs: tokens that these hide are not loaded.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.flash_attention import masks, sequence_info
from ejkernel.types import KernelConfig

from . import lists, tiles
from .call import Call

# The size and the warps of the tiles of pairs that are evaluated; these are kept in registers.
_TILE, _WARPS = 64, 4


def zero_hidden_keys(call: Call, *arrays: Array | None) -> tuple[Array | None, ...]:
    """Arrays [B, K, G, ·] or None, zero in keys that no query sees."""
    if not call.hides_tokens:
        return arrays
    problem, tile = call.problem, call.tile(_TILE, _TILE)
    of_queries, blocks = call.lists_of_queries(tile), math.ceil(problem.K / tile[1])
    is_visible = _launch.launch(
        visible_keys_kernel,
        *_masks(call),
        *call.intervals,
        *of_queries,
        out_type=jax.ShapeDtypeStruct((problem.B, problem.G, problem.K), jnp.int32),
        grid=blocks * problem.G * problem.B,
        config=KernelConfig(block_q=tile[0], block_k=tile[1], num_warps=_WARPS, num_stages=1),
        problem=problem,
        **of_queries.constants,
        BLOCKS=blocks,
        Q_BLOCKS=math.ceil(problem.S / tile[0]),
        OF_GROUPS=call.lists_are_of_groups,
        BLOCK_Q=tile[0],
        BLOCK_K=tile[1],
    )
    return _zeroed(is_visible, arrays)


def zero_fully_masked_queries(call: Call, *arrays: Array) -> tuple[Array, ...]:
    """Arrays [B, S, H, ·], zero in queries that see no key."""
    if not call.hides_tokens:
        return arrays
    problem, tile = call.problem, call.tile(_TILE, _TILE)
    of_keys, blocks = call.lists_of_keys(tile), math.ceil(problem.S / tile[0])
    is_visible = _launch.launch(
        seeing_queries_kernel,
        *_masks(call),
        *call.intervals,
        *of_keys,
        out_type=jax.ShapeDtypeStruct((problem.B, problem.H, problem.S), jnp.int32),
        grid=blocks * problem.H * problem.B,
        config=KernelConfig(block_q=tile[0], block_k=tile[1], num_warps=_WARPS, num_stages=1),
        problem=problem,
        **of_keys.constants,
        BLOCKS=blocks,
        BLOCK_Q=tile[0],
        BLOCK_K=tile[1],
    )
    return _zeroed(is_visible, arrays)


def _masks(call: Call) -> tuple[Array | None, ...]:
    x = call.operands
    return x.mask, x.q_segment_ids, x.kv_segment_ids


def _zeroed(is_visible: Array, arrays: tuple) -> tuple:
    is_visible = is_visible.swapaxes(1, 2)[..., None] > 0
    return tuple(None if x is None else jnp.where(is_visible, x, jnp.zeros((), x.dtype)) for x in arrays)


@triton.jit
def visible_keys_kernel(
    mask, q_segment_ids, kv_segment_ids, first_keys, stop_keys, order, counts, entries,
    is_visible,
    problem: tl.constexpr, LISTS: tl.constexpr, LONGEST: tl.constexpr, BLOCKS: tl.constexpr, Q_BLOCKS: tl.constexpr,
    OF_GROUPS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes, as [B, G, K], whether any query of any head of the group sees a key."""
    block, kv_head, batch, count, entries = lists.list_of_program(
        order, counts, entries, LISTS, LONGEST, BLOCKS, problem.G
    )
    first, info = tiles.place(block, kv_head * problem.group, batch, problem, BLOCK_K)
    keys = first + tl.arange(0, BLOCK_K)
    some = tl.zeros([BLOCK_K], tl.int32)
    for n in tl.range(0, tiles.steps_of(count, problem, OF_GROUPS)):
        head, tile = tiles.queries_of_step(entries, n, count, info, problem, Q_BLOCKS, OF_GROUPS)
        here, start = sequence_info.of_head(info, head), tile * BLOCK_Q
        ok = pairs(
            mask, q_segment_ids, kv_segment_ids, first_keys, stop_keys, start, keys[None, :], here, problem, BLOCK_Q
        )
        some = tl.maximum(some, tl.max(ok.to(tl.int32), 0))
    tl.store(is_visible + (batch * problem.G + kv_head) * problem.K + keys, some, mask=keys < problem.K)


@triton.jit
def seeing_queries_kernel(
    mask, q_segment_ids, kv_segment_ids, first_keys, stop_keys, order, counts, entries,
    seeing,
    problem: tl.constexpr, LISTS: tl.constexpr, LONGEST: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes, as [B, H, S], whether a query sees any key."""
    block, head, batch, count, entries = lists.list_of_program(
        order, counts, entries, LISTS, LONGEST, BLOCKS, problem.H
    )
    first, info = tiles.place(block, head, batch, problem, BLOCK_Q)
    some = tl.zeros([BLOCK_Q], tl.int32)
    for n in tl.range(0, count):
        j = tl.load(entries + n) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        ok = pairs(mask, q_segment_ids, kv_segment_ids, first_keys, stop_keys, first, j, info, problem, BLOCK_Q)
        some = tl.maximum(some, tl.max(ok.to(tl.int32), 1))
    rows = first + tl.arange(0, BLOCK_Q)
    tl.store(seeing + (batch * problem.H + head) * problem.S + rows, some, mask=rows < problem.S)


@triton.jit
def pairs(mask, q_segment_ids, kv_segment_ids, first_keys, stop_keys, first, j, info, problem: tl.constexpr,
          BLOCK_Q: tl.constexpr):  # fmt: skip
    """Whether the queries from `first` on see the keys j [1, columns]."""
    i = (first + tl.arange(0, BLOCK_Q))[:, None]
    ok = masks.visible(i, j, (q_segment_ids, kv_segment_ids), info, problem)
    if mask is not None:
        ok &= masks.unmasked(mask, i, j, info, problem)
    if first_keys is not None:
        first_key = tiles.interval_ends(first_keys, first, i, info, problem, 0)
        stop_key = tiles.interval_ends(stop_keys, first, i, info, problem, 0)
        ok &= (j >= first_key) & (j < stop_key)
    return ok
