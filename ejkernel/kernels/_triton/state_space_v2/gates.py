"""Sums of log decays of a state space, once for all kernels of a call, with the tokens of a head side by side.

With g_t = dt_t A, of the tokens of a chunk G_t is the sum up to t, U_t that of those after t, and T that of all.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._recurrence import tiles
from ejkernel.kernels._triton._recurrence.problem import Places, Problem
from ejkernel.types.recurrence import RecurrenceConfig

HEADS = 32
"""The heads of a program."""
LOWEST = tl.constexpr(-1e30)
"""Below G of any row, so that no row has a decay to one that does not exist, nor is NaN."""


class Gates(NamedTuple):
    """G, U and dt [b,h,s] float32."""

    G: Any
    U: Any
    dt: Any


def gates_of(g, dt, places: Places, p: Problem, config: RecurrenceConfig) -> Gates:
    """From g and dt [b,s,h]; tokens of no sequence are not written."""
    of_head = jax.ShapeDtypeStruct((p.B, p.H, p.S), jnp.float32)
    return Gates(
        *_launch.launch(
            gates_kernel,
            *(g, dt),
            *places[:4],
            out_type=(of_head, of_head, of_head),
            grid=p.B * p.chunks * triton.cdiv(p.H, HEADS),
            config=RecurrenceConfig(chunk_size=config.chunk_size, num_warps=4, num_stages=1),
            p=p,
            HEADS=HEADS,
        )
    )


@triton.jit
def gates_kernel(g, dt, first, length, chunk, owner, G, U, steps, p: tl.constexpr, HEADS: tl.constexpr):
    blocks: tl.constexpr = (p.H + HEADS - 1) // HEADS
    pid = tl.program_id(0)
    number, batch = pid // blocks % p.chunks, pid // (blocks * p.chunks)
    at, left = tiles.chunk_at(batch, number, first, length, chunk, owner, p)
    rows, heads = tl.arange(0, p.C), pid % blocks * HEADS + tl.arange(0, HEADS)
    exists = (rows < left)[:, None] & (heads < p.H)[None, :]
    here = (tl.cast(batch, tl.int64) * p.S + at) * p.H + rows[:, None] * p.H + heads[None, :]
    there = tl.cast(batch, tl.int64) * (p.S * p.H) + at + heads[None, :] * p.S + rows[:, None]
    gate = tiles.finite(tl.load(g + here, mask=exists, other=0.0))
    tl.store(G + there, tl.cumsum(gate, 0), mask=exists)
    tl.store(U + there, tl.cumsum(gate, 0, reverse=True) - gate, mask=exists)
    tl.store(steps + there, tl.load(dt + here, mask=exists, other=0.0).to(tl.float32), mask=exists)


@triton.jit
def load_gates(G, U, dt, batch, at, left, head, p: tl.constexpr):
    """G, U and dt of a chunk; of rows that do not exist LOWEST, 0 and 0."""
    here, exists = token_places(batch, at, left, head, p)
    G_tile = tl.load(G + here, mask=exists, other=LOWEST)
    return G_tile, tl.load(U + here, mask=exists, other=0.0), tl.load(dt + here, mask=exists, other=0.0)


@triton.jit
def load_total(G, batch, at, left, head, p: tl.constexpr):
    """T, the sum of the log decays of a chunk."""
    last = tl.cast(batch * p.H + head, tl.int64) * p.S + at + tl.minimum(left, p.C) - 1
    return tl.load(G + last, mask=left > 0, other=0.0)


@triton.jit
def token_places(batch, at, left, head, p: tl.constexpr):
    """Where the tokens of a chunk are in an array [b,h,s], and which of them exist."""
    rows = tl.arange(0, p.C)
    return tl.cast(batch * p.H + head, tl.int64) * p.S + at + rows, rows < left
