"""Split-KV decoding (Flash-Decoding): the keys of a sequence are cut into parts, computed side by side and merged.

A program has one query of a sequence, of all heads that share a key/value head, and one part of the keys that the query
sees. It reads each key and value once, and leaves its own o and lse:

    s_j = softcap·tanh(scale·q·k_j / softcap),    lse_p = log Σ_j exp s_j,    o_p = Σ_j exp(s_j − lse_p) v_j

of which `merged` makes those of all parts and of the sinks,

    lse = log(Σ_p exp lse_p + Σ_x exp sinks_x),    o = Σ_p exp(lse_p − lse) o_p

Statistics are relative to maxima in logits of base 2. Slots that the query does not see are not read.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax import Array

from ejkernel.kernels._triton import _launch
from ejkernel.types import KernelConfig

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SMALLEST_TILE = 16


@dataclass(frozen=True)
class Strides:
    """Elements from one to the next along the axes of an array [batch?, page?, slot?, group?]; 0 where there is one."""

    batch: int
    page: int
    slot: int
    group: int


@dataclass(frozen=True)
class Problem:
    """The shapes of one call, and what is computed, as a compile-time constant.

    Attributes:
        B, H, G, D, V: sequences, query and key/value heads, features of keys and of values.
        pages, page: how many pages the pool has, and slots of each.
        columns: pages of a sequence in its table.
        splits: parts that the keys of a sequence are cut into.
        scale: the factor of q·k.
        softcap: the bound of the logits, or None.
        k, v: where keys and values stand, in rows of D and V features.
        k_scale, v_scale: where their factors stand, if there are any.
    """

    B: int
    H: int
    G: int
    D: int
    V: int
    pages: int
    page: int
    columns: int
    splits: int
    scale: float
    softcap: float | None
    k: Strides
    v: Strides
    k_scale: Strides | None
    v_scale: Strides | None


def strides_of(shape: tuple[int, ...]) -> Strides:
    """Of a dense array [batch, page, slot, group]."""
    found, step = [], 1
    for size in reversed(shape):
        found.append(0 if size == 1 else step)
        step *= size
    return Strides(*reversed(found))


def decode(
    q: Array,
    k: Array,
    v: Array,
    first: Array,
    stop: Array,
    valid: Array,
    block_tables: Array,
    sinks: Array | None,
    k_scale: Array | None,
    v_scale: Array | None,
    *,
    spec: Any,
    splits: int,
    config: KernelConfig,
) -> tuple[Array, Array]:
    """o [m,b,h,e] and lse [m,b,h] of queries [m,b,h,d] that see the keys first ≤ j < stop [m,b] of their sequence.

    Where `valid` [m,b] is False there is no query: o = 0 and lse = −∞, sinks or not.
    k and v are [m?,p,s,g,·], the pages of a sequence those of block_tables [m,b,j], the scales [m?,p?,s?,g?];
    `config.block_k` keys are a tile, and the query heads of a group are padded to the rows of one.
    """
    (M, B, H, D), (_, pages, page, G, _), V = q.shape, k.shape, v.shape[4]
    problem = Problem(
        B, H, G, D, V, pages, page,
        block_tables.shape[2], splits, spec.softmax_scale, spec.softcap,
        strides_of(k.shape[:4]), strides_of(v.shape[:4]),
        None if k_scale is None else strides_of(k_scale.shape),
        None if v_scale is None else strides_of(v_scale.shape),
    )  # fmt: skip
    rows = max(SMALLEST_TILE, triton.next_power_of_2(H // G))
    of = jax.ShapeDtypeStruct
    o, lse = _launch.launch(
        decode_kernel,
        q, k, v, first, stop, block_tables, k_scale, v_scale,
        out_type=(of((M, B, splits, H, V), jnp.float32), of((M, B, splits, H), jnp.float32)),
        grid=M * B * splits * G,
        config=config,
        problem=problem,
        ROWS=rows,
        BLOCK_K=config.block_k,
        WIDTH=max(SMALLEST_TILE, triton.next_power_of_2(D)),
        V_WIDTH=max(SMALLEST_TILE, triton.next_power_of_2(V)),
    )  # fmt: skip
    o, lse = merged(o, lse, sinks, q.dtype, in_order=spec.batch_invariant)
    return o, jnp.where(valid[..., None], lse, np.float32(-np.inf))


def merged(o: Array, lse: Array, sinks: Array | None, dtype: Any, in_order: bool) -> tuple[Array, Array]:
    """o [m,b,h,e] in dtype and lse [m,b,h] of parts [m,b,p,h,…], with the sinks [m?,h,x] of each head.

    `in_order` adds up one part after the other, whatever the sizes of other axes.
    """
    total, finite = lse.max(2), lambda x: jnp.where(jnp.isfinite(x), x, np.float32(0))
    if sinks is not None:
        total = jnp.maximum(total, sinks.max(-1)[:, None])
    weights = jnp.exp(lse - finite(total)[:, :, None])
    add = (lambda x: functools.reduce(operator.add, jnp.unstack(x, axis=2))) if in_order else (lambda x: x.sum(2))
    sum_ = add(weights)
    if sinks is not None:
        sum_ = sum_ + jnp.exp(sinks[:, None] - finite(total)[..., None]).sum(-1)
    o = add(o * weights[..., None]) / jnp.where(sum_ == 0, np.float32(1), sum_)[..., None]
    return o.astype(dtype), finite(total) + jnp.log(sum_)


@triton.jit
def decode_kernel(
    q, k, v, first, stop, block_tables, k_scale, v_scale,
    o, lse,
    problem: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) % problem.G
    part = tl.program_id(0) // problem.G % problem.splits
    sequence = tl.program_id(0) // (problem.G * problem.splits)  # of all batches
    batch = sequence // problem.B
    low, high = tl.load(first + sequence), tl.load(stop + sequence)
    heads: tl.constexpr = problem.H // problem.G
    k_strides: tl.constexpr = problem.k
    v_strides: tl.constexpr = problem.v
    k_scale_strides: tl.constexpr = problem.k_scale
    v_scale_strides: tl.constexpr = problem.v_scale
    row, d, e = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
    head = (sequence * problem.H + group * heads + row).to(tl.int64)
    queries = tl.load(
        q + head[:, None] * problem.D + d[None, :], mask=(row < heads)[:, None] & (d < problem.D)[None, :], other=0.0
    )
    # The parts are of whole tiles, which begin where a tile of the cache does: they depend on the sequence alone.
    first_tile = low // BLOCK_K
    each = tl.cdiv(tl.cdiv(high, BLOCK_K) - first_tile, problem.splits)
    begin = first_tile + part * each
    end = tl.minimum(begin + each, tl.cdiv(high, BLOCK_K))
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    for tile in tl.range(begin, end):
        position = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        visible = (position >= low) & (position < high)
        page, slot = place(block_tables, sequence, position, visible, problem)
        keys = tl.load(
            k + rows_at(k_strides, batch, page, slot, group)[:, None] * problem.D + d[None, :],
            mask=visible[:, None] & (d < problem.D)[None, :],
            other=0.0,
        )
        factor = scales_at(k_scale, k_scale_strides, batch, page, slot, group, visible)
        s = tl.dot(queries, tl.trans(in_dtype(keys, queries)), input_precision="ieee") * problem.scale
        if factor is not None:
            s *= factor[None, :]
        if problem.softcap is not None:
            s = problem.softcap * tanh(s * (1 / problem.softcap))
        s = tl.where(visible[None, :], s * LOG2E, float("-inf"))
        highest = tl.maximum(maximum, tl.max(s, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(maximum - base)
        total = total * alpha + tl.sum(p, 1)
        values = tl.load(
            v + rows_at(v_strides, batch, page, slot, group)[:, None] * problem.V + e[None, :],
            mask=visible[:, None] & (e < problem.V)[None, :],
            other=0.0,
        )
        factor = scales_at(v_scale, v_scale_strides, batch, page, slot, group, visible)
        if factor is not None:
            p *= factor[None, :]
        values = in_dtype(values, queries)
        acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision="ieee")
        maximum = highest
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    out = ((sequence * problem.splits + part) * problem.H + group * heads + row).to(tl.int64)
    tl.store(o + out[:, None] * problem.V + e[None, :], acc, mask=(row < heads)[:, None] & (e < problem.V)[None, :])
    tl.store(lse + out, maximum * LN2 + tl.log(total), mask=row < heads)


@triton.jit
def place(block_tables, sequence, position, visible, problem: tl.constexpr):
    """Page and slot of the keys at these positions; a page that is not in the pool is the nearest one that is."""
    at = sequence.to(tl.int64) * problem.columns + position // problem.page
    page = tl.load(block_tables + at, mask=visible, other=0)
    page = tl.minimum(tl.maximum(page, 0), problem.pages - 1)
    return page, position % problem.page


@triton.jit
def rows_at(strides: tl.constexpr, batch, page, slot, group):
    """Which row of an array [batch, page, slot, group] is that of these."""
    return (
        page.to(tl.int64) * strides.page
        + batch.to(tl.int64) * strides.batch
        + slot * strides.slot
        + (group * strides.group)
    )


@triton.jit
def scales_at(scales, strides: tl.constexpr, batch, page, slot, group, visible):
    """The factors of a tile of keys or values, 0 for those that are not visible; None where there are none."""
    if scales is None:
        return
    else:
        return tl.load(scales + rows_at(strides, batch, page, slot, group), mask=visible, other=0.0)


@triton.jit
def in_dtype(x, queries):
    """Keys or values as they are multiplied: eight bits in the dtype of the queries, which holds all of these."""
    if x.dtype == queries.dtype:
        return x
    elif x.dtype == tl.int8:
        return x.to(tl.float32).to(queries.dtype)
    else:
        return x.to(queries.dtype)


@triton.jit
def tanh(x):
    """(1 − e) / (1 + e) with e = exp(−2|x|) and the sign of x; by its series where 1 − e has few bits."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    y = (1 - e) / (1 + e)
    z = x * x
    series = x + x * z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835))))
    return tl.where(z < 0.0625, series, tl.where(x < 0, -y, y))
