"""The compile-time constants of the kernels of state_space_v1, and tiles of chunks."""

from dataclasses import dataclass

import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._recurrence.problem import padded
from ejkernel.primitives.state_space_v1 import Operands
from ejkernel.types.recurrence import RecurrenceConfig

LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class Problem:
    """The shapes of one call, as a compile-time constant.

    Attributes:
        B, S, H, N: batch, tokens, channels, numbers of the state of a channel.
        sequences: of a batch element; 1 if none are packed.
        packed: whether spans are given.
        A_ALL, D_ALL, SPANS_ALL: whether A, D and the spans are those of all of the batch.
        C: tokens of a chunk.
        CHANNELS: of a program.
        ptx: whether kernels may have instructions of PTX.
    """

    B: int
    S: int
    H: int
    N: int
    sequences: int
    packed: bool
    A_ALL: bool
    D_ALL: bool
    SPANS_ALL: bool
    C: int
    CHANNELS: int
    ptx: bool

    @property
    def NUMBERS(self) -> int:
        """The numbers of the state of a channel in a tile."""
        return padded(self.N)

    @property
    def chunks(self) -> int:
        """The most chunks of a batch element, by their places: each sequence may begin and end in the midst of one."""
        return self.S // self.C + self.sequences

    @property
    def blocks(self) -> int:
        """The programs of a sequence."""
        return triton.cdiv(self.H, self.CHANNELS)

    def at_once(self, most: int) -> int:
        """The tokens whose rows are loaded before the first of them is used, up to `most`."""
        return min(most, triton.next_power_of_2(self.S))


def problem_of(x: Operands, config: RecurrenceConfig) -> Problem:
    """The `Problem` of a call."""
    (B, S, H), N = x.x.shape, x.A.shape[2]
    alone = lambda a: a is not None and a.shape[0] == 1
    sequences = 1 if x.spans is None else x.spans.shape[1]
    return Problem(
        B, S, H, N, sequences, x.spans is not None, alone(x.A), alone(x.D), alone(x.spans), config.chunk_size,
        config.block_v, _launch.has_ptx(),
    )  # fmt: skip


def spans_of(x: Operands) -> Array | None:
    """The spans as int32."""
    return None if x.spans is None else x.spans.astype(jnp.int32)


@triton.jit
def place_of_program(spans, p: tl.constexpr):
    """First channel, batch element and number of the sequence of a program, and its first token and the one after."""
    block, rest = tl.program_id(0) % p.blocks, tl.program_id(0) // p.blocks
    n, batch = rest % p.sequences, (rest // p.sequences).to(tl.int64)
    if p.packed:
        span = spans + ((0 if p.SPANS_ALL else batch) * p.sequences + n) * 2
        return block * p.CHANNELS, batch, n, tl.load(span), tl.load(span + 1)
    else:
        tokens: tl.constexpr = p.S
        return block * p.CHANNELS, batch, n, 0, tokens


@triton.jit
def load_of_channels(a, batch, token, after, channel, p: tl.constexpr):
    """A token's row of an array [b,s,h], [CHANNELS] in float32; 0 past the end of its sequence."""
    h = channel + tl.arange(0, p.CHANNELS)
    exists = (h < p.H) & (token < after)
    return tl.load(a + (batch * p.S + token) * p.H + h, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def store_of_channels(a, row, batch, token, after, channel, p: tl.constexpr):
    """Stores a row where `load_of_channels` would load it."""
    h = channel + tl.arange(0, p.CHANNELS)
    exists = (h < p.H) & (token < after)
    tl.store(a + (batch * p.S + token) * p.H + h, row.to(a.dtype.element_ty), mask=exists)


@triton.jit
def load_of_state(a, batch, token, after, p: tl.constexpr):
    """A token's row of an array [b,s,d], [NUMBERS] in float32; 0 past the end of its sequence."""
    d = tl.arange(0, p.NUMBERS)
    exists = (d < p.N) & (token < after)
    return tl.load(a + (batch * p.S + token) * p.N + d, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def store_of_state(a, row, batch, token, after, p: tl.constexpr):
    """Stores a row where `load_of_state` would load it."""
    d = tl.arange(0, p.NUMBERS)
    exists = (d < p.N) & (token < after)
    tl.store(a + (batch * p.S + token) * p.N + d, row.to(a.dtype.element_ty), mask=exists)


@triton.jit
def pointers_of_state(a, number, channel, p: tl.constexpr):
    """Pointers to the channels of a program in state `number` of an array [·,h,d], and which elements exist."""
    h, d = channel + tl.arange(0, p.CHANNELS), tl.arange(0, p.NUMBERS)
    return a + (number * p.H + h)[:, None] * p.N + d[None, :], (h < p.H)[:, None] & (d < p.N)[None, :]


@triton.jit
def load_state(a, number, channel, p: tl.constexpr):
    """The channels of a program in state `number` of an array [·,h,d], [CHANNELS,NUMBERS] in float32; 0 if absent."""
    state = tl.full([p.CHANNELS, p.NUMBERS], 0.0, tl.float32)
    if a is not None:
        address, exists = pointers_of_state(a, number, channel, p)
        state += tl.load(address, mask=exists, other=0.0).to(tl.float32)
    return state


@triton.jit
def store_state(a, state, number, channel, p: tl.constexpr):
    """Stores a state where `load_state` would load it."""
    address, exists = pointers_of_state(a, number, channel, p)
    tl.store(address, state.to(a.dtype.element_ty), mask=exists)


@triton.jit
def load_skip(D, batch, channel, p: tl.constexpr):
    """The factors D of x [CHANNELS] in float32, 0 if absent."""
    h, skip = channel + tl.arange(0, p.CHANNELS), tl.full([p.CHANNELS], 0.0, tl.float32)
    if D is not None:
        skip += tl.load(D + (0 if p.D_ALL else batch) * p.H + h, mask=h < p.H, other=0.0).to(tl.float32)
    return skip


@triton.jit
def load_decay_rates(A, batch, channel, p: tl.constexpr):
    """A · log₂ e of the channels of a program, [CHANNELS,NUMBERS]."""
    return load_state(A, 0 if p.A_ALL else batch, channel, p) * LOG2_E


@triton.jit
def decays_of(dt_row, A_tile, p: tl.constexpr):
    """exp(dt · A) [CHANNELS,NUMBERS] for A times log₂ e. What is less than the smallest normal number is 0 in PTX."""
    exponents = dt_row[:, None] * A_tile
    if p.ptx:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponents], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(exponents)


@triton.jit
def outer(of_channels, of_state):
    """The products of [CHANNELS] and [NUMBERS]."""
    return of_channels[:, None] * of_state[None, :]


@triton.jit
def advanced(state, x, dt, B, A_tile, batch, first, after, channel, AT_ONCE: tl.constexpr, p: tl.constexpr):
    """The state after AT_ONCE tokens from `first` on, and for each of them exp(dt · A) ∘ the state before it."""
    kept = ()
    for i in tl.static_range(AT_ONCE):
        x_row = load_of_channels(x, batch, first + i, after, channel, p)
        dt_row = load_of_channels(dt, batch, first + i, after, channel, p)
        B_row = load_of_state(B, batch, first + i, after, p)
        decayed = decays_of(dt_row, A_tile, p) * state
        kept += (decayed,)
        state = decayed + outer(dt_row * x_row, B_row)
    return state, kept
