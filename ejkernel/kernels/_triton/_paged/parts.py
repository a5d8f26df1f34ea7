"""Merges the parts that the keys of rows were cut into, each of which has left its o_p and lse_p, in one launch:

    lse = log(Σ_p exp lse_p + exp sink),    o = Σ_p exp(lse_p − lse) o_p

By XLA that is four launches, which cost more than the bytes of a decode: 128 heads of 512 features in 64 parts are
17 MB, which lie in the L2 cache.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from ejkernel.kernels._triton import _launch
from ejkernel.types import KernelConfig

from . import power_of_two

# Features of a program, and the rows × parts that it loads at once: 32 numbers for each of its 128 threads.
COLUMNS, AT_ONCE = 128, 32
# Steps that the loop over parts has at most: it is unrolled, so that what they load is under way together.
MOST_STEPS = 8


def merge_parts(
    o: Array,
    lse: Array,
    sinks: Array | None,
    parts: int,
    inner: int,
    dtype: jnp.dtype,
    batch_invariant: bool = False,
) -> tuple[Array, Array]:
    """o [rows, features] in a dtype and lse [rows] of all parts, o [rows·parts, features] and lse [rows·parts, ·].

    The first column of lse is read. The parts of every `inner` rows follow one another. `sinks` [rows] are a part
    without values. With `batch_invariant` the order of a row's sums does not depend on how many parts there may be.
    """
    rows, features = o.shape[0] // parts, o.shape[1]
    fitting = max(min(AT_ONCE, power_of_two(parts)), power_of_two(parts) // MOST_STEPS)
    tile = AT_ONCE if batch_invariant else fitting
    of_program = max(1, AT_ONCE // tile)
    return _launch.launch(
        parts_kernel, o, lse, sinks,
        out_type=(jax.ShapeDtypeStruct((rows, features), dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)),
        grid=triton.cdiv(rows, of_program) * triton.cdiv(features, COLUMNS),
        config=KernelConfig(num_warps=4, num_stages=1),
        rows=rows, parts=parts, inner=inner, features=features, lse_stride=lse.shape[1],
        ROWS=of_program, PARTS=tile, COLUMNS=COLUMNS,
    )  # fmt: skip


@triton.jit
def parts_kernel(
    o_parts, lse_parts, sinks, o, lse,
    rows: tl.constexpr, parts: tl.constexpr, inner: tl.constexpr, features: tl.constexpr, lse_stride: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program has some features of some rows."""
    column_blocks: tl.constexpr = (features + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) // column_blocks * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside, is_feature = row < rows, column < features
    first = (row // inner).to(tl.int64) * (parts * inner) + row % inner  # its first part
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    if sinks is not None:
        maximum = tl.load(sinks + row, mask=inside, other=float("-inf"))
    sink = maximum
    for start in tl.static_range(0, parts, PARTS):
        maximum = tl.maximum(
            maximum, tl.max(lse_of(lse_parts, first, inside, start, parts, inner, lse_stride, PARTS), 1)
        )
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.zeros([ROWS, PARTS], tl.float32)
    acc = tl.zeros([ROWS, PARTS, COLUMNS], tl.float32)
    for start in tl.static_range(0, parts, PARTS):
        weights = tl.exp(lse_of(lse_parts, first, inside, start, parts, inner, lse_stride, PARTS) - base[:, None])
        part = start + tl.arange(0, PARTS)
        at = first[:, None] + part[None, :] * inner
        there = inside[:, None, None] & (part < parts)[None, :, None] & is_feature[None, None, :]
        values = tl.load(o_parts + at[:, :, None] * features + column[None, None, :], mask=there, other=0.0)
        acc += values.to(tl.float32) * weights[:, :, None]
        total += weights
    summed = tl.sum(total, 1) + tl.exp(sink - base)
    found = tl.sum(acc, 1) / tl.where(summed == 0.0, 1.0, summed)[:, None]
    at = row.to(tl.int64)[:, None] * features + column[None, :]
    tl.store(o + at, found.to(o.dtype.element_ty), mask=inside[:, None] & is_feature[None, :])
    tl.store(lse + row, base + tl.log(summed), mask=inside & (tl.program_id(0) % column_blocks == 0))


@triton.jit
def lse_of(
    lse_parts, first, inside, start, parts: tl.constexpr, inner: tl.constexpr, lse_stride: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """[ROWS, PARTS] from a part on, −∞ past the last."""
    part = start + tl.arange(0, PARTS)
    there = inside[:, None] & (part < parts)[None, :]
    return tl.load(lse_parts + (first[:, None] + part[None, :] * inner) * lse_stride, mask=there, other=float("-inf"))
