"""The compile-time constants of the kernels of state_space_v1, and tiles of chunks."""

from dataclasses import dataclass

import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from ejkernel.kernels._triton._recurrence.problem import padded
from ejkernel.primitives.state_space_v1 import Operands
from ejkernel.types.recurrence import RecurrenceConfig


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


def problem_of(x: Operands, config: RecurrenceConfig) -> Problem:
    """The `Problem` of a call."""
    (B, S, H), N = x.x.shape, x.A.shape[2]
    alone = lambda a: a is not None and a.shape[0] == 1
    sequences = 1 if x.spans is None else x.spans.shape[1]
    return Problem(
        B, S, H, N, sequences, x.spans is not None, alone(x.A), alone(x.D), alone(x.spans), config.chunk_size,
        config.block_v,
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
def load_of_channels(a, batch, token, first, after, channel, p: tl.constexpr):
    """The rows of a chunk of an array [b,s,h], [C,CHANNELS] in float32; 0 before token `first` and past the end."""
    row, h = token + tl.arange(0, p.C), channel + tl.arange(0, p.CHANNELS)
    at = (batch * p.S + row)[:, None] * p.H + h[None, :]
    return tl.load(a + at, mask=((row >= first) & (row < after))[:, None] & (h < p.H)[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def store_of_channels(a, tile, batch, token, after, channel, p: tl.constexpr):
    """Stores a tile where `load_of_channels` would load it."""
    row, h = token + tl.arange(0, p.C), channel + tl.arange(0, p.CHANNELS)
    at = (batch * p.S + row)[:, None] * p.H + h[None, :]
    tl.store(a + at, tile.to(a.dtype.element_ty), mask=(row < after)[:, None] & (h < p.H)[None, :])


@triton.jit
def load_of_state(a, batch, token, first, after, p: tl.constexpr):
    """The rows of a chunk of an array [b,s,d], [C,NUMBERS] in float32; 0 before token `first` and past the end."""
    row, d = token + tl.arange(0, p.C), tl.arange(0, p.NUMBERS)
    at = (batch * p.S + row)[:, None] * p.N + d[None, :]
    return tl.load(a + at, mask=((row >= first) & (row < after))[:, None] & (d < p.N)[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def store_of_state(a, tile, batch, token, after, p: tl.constexpr):
    """Stores a tile where `load_of_state` would load it."""
    row, d = token + tl.arange(0, p.C), tl.arange(0, p.NUMBERS)
    at = (batch * p.S + row)[:, None] * p.N + d[None, :]
    tl.store(a + at, tile.to(a.dtype.element_ty), mask=(row < after)[:, None] & (d < p.N)[None, :])


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
def decays_of(dt_tile, A_tile):
    """exp(dt · A) [C,CHANNELS,NUMBERS]."""
    return tl.exp(dt_tile[:, :, None] * A_tile[None, :, :])


@triton.jit
def outer(of_channels, of_state):
    """The products of [C,CHANNELS] and [C,NUMBERS], of each token."""
    return of_channels[:, :, None] * of_state[:, None, :]


@triton.jit
def scanned(state, decays, added):
    """The states after each token of a chunk, h_t = decays_t ∘ h_{t−1} + added_t, from the state before it.

    (a₁, u₁) followed by (a₂, u₂) is h ↦ a₂ a₁ h + a₂ u₁ + u₂.
    """
    decays, added = tl.associative_scan((decays, added), 0, followed)
    return decays * state[None, :, :] + added


@triton.jit
def scanned_back(state, decays, added):
    """h_t = decays_t ∘ h_{t+1} + added_t, from the state after a chunk."""
    decays, added = tl.associative_scan((decays, added), 0, followed, reverse=True)
    return decays * state[None, :, :] + added


@triton.jit
def followed(a, u, a_next, u_next):
    return a_next * a, a_next * u + u_next


@triton.jit
def row_of(states, row: tl.constexpr, p: tl.constexpr):
    """One token's state of a chunk's."""
    return tl.sum(tl.where((tl.arange(0, p.C) == row)[:, None, None], states, 0.0), 0)


@triton.jit
def states_before(state, x, dt, B, A_tile, batch, token, after, channel, p: tl.constexpr):
    """The states before each token of a chunk, from that before the first: after the tokens one place earlier.

    The first row, which is in the state already, is read as zeros.
    """
    x_tile = load_of_channels(x, batch, token - 1, token, after, channel, p)
    dt_tile = load_of_channels(dt, batch, token - 1, token, after, channel, p)
    B_tile = load_of_state(B, batch, token - 1, token, after, p)
    return scanned(state, decays_of(dt_tile, A_tile), outer(dt_tile * x_tile, B_tile))
