"""The compile-time constants of the kernels of the linear recurrence, and the places of packed sequences."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton

from ejkernel.kernels._triton import _launch
from ejkernel.primitives._recurrence import Operands, RecurrenceSpec
from ejkernel.xla_utils.search import entries_until


@dataclass(frozen=True)
class Problem:
    """The shapes and options of one call, as a compile-time constant.

    Attributes:
        B, S, H: batch, tokens, and heads of the state.
        HQ, HK, HV: heads of queries, keys and values: H, or fewer, each shared by a group of heads of the state.
        D, V: the two feature sizes.
        N: sequences in a packed call, None in a dense one.
        C: tokens of a chunk.
        scale: the factor of q.
        reverse: time runs from the last token to the first.
        by_head: there is a decay for each head, whether it varies with the token or not.
        by_feature: there is a decay for each key feature.
        dtype: Triton's dtype of the operands of products.
        precision: Triton's input_precision of products in float32.
        exact: the inputs are float32: sums of decays are not computed as differences of longer sums.
        sums_by_product: running sums of decays in bfloat16 are products with a triangular matrix of ones. Triton 3.6
            fails to compile that for Blackwell.
        transposed: states are stored as [V, D].
        of_space: those that are operands or results are, as a state space has them.
    """

    B: int
    S: int
    H: int
    HQ: int
    HK: int
    HV: int
    D: int
    V: int
    N: int | None
    C: int
    scale: float
    reverse: bool
    by_head: bool
    by_feature: bool
    dtype: Any
    precision: str
    exact: bool
    sums_by_product: bool
    transposed: bool = False
    of_space: bool = False

    @property
    def per_query(self) -> int:
        """Heads of the state that share queries."""
        return self.H // self.HQ

    @property
    def per_key(self) -> int:
        """Heads of the state that share keys."""
        return self.H // self.HK

    @property
    def per_value(self) -> int:
        """Heads of the state that share values."""
        return self.H // self.HV

    @property
    def sequences(self) -> int:
        return 1 if self.N is None else self.N

    @property
    def step(self) -> int:
        """The distance from a token to the next in time: 1, or −1 if time is reversed."""
        return -1 if self.reverse else 1

    @property
    def chunks(self) -> int:
        """The number of chunks of a batch element; in a packed call each sequence may end in a partial chunk."""
        return triton.cdiv(self.S, self.C) if self.N is None else (self.S + self.N * (self.C - 1)) // self.C

    @property
    def weight_parts(self) -> int:
        """The number of parts (the rounded value, its rounding error, …) in which weights enter a product.

        If features decay, q and k are rounded once more than otherwise; a further part of the weights makes up for it.
        """
        return 2 if self.by_feature and self.dtype == triton.language.bfloat16 else 1

    @property
    def of_values(self) -> "Problem":
        """The problem with the features of values in the place of those of keys, for decays of values.

        Every head of the state then has queries of its own.
        """
        sizes = dict(D=self.V, V=self.D, HK=self.HV, HV=self.HK)
        return replace(self, **sizes, by_head=False, by_feature=True, transposed=not self.transposed)

    @property
    def of_ends(self) -> "Problem":
        """The problem by which states that are operands or results are stored."""
        return replace(self, transposed=self.transposed != self.of_space, of_space=False)

    @property
    def state(self) -> tuple[int, int]:
        """The sizes of a state that is an operand or a result."""
        return (self.V, self.D) if self.of_space else (self.D, self.V)

    @property
    def D_PAD(self) -> int:
        return padded(self.D)

    @property
    def V_PAD(self) -> int:
        return padded(self.V)


def problem_of(x: Operands, spec: RecurrenceSpec, chunk: int, *, wide: bool = False, of_space: bool = False) -> Problem:
    """The `Problem` of a call.

    Products are computed as three of TF32 (on AMD in float32) for float16 operands, if values decay, and with `wide`:
    the range of float16 is too small for decays, and bfloat16 too coarse for both factors of a product.
    """
    (B, S, HQ, D), (_, _, HV, V) = x.q.shape, x.v.shape
    half = x.q.dtype == jnp.bfloat16 and x.gv is None and not wide
    return Problem(
        *(B, S, max(HQ, HV), HQ, x.k.shape[2], HV, D, V),
        N=None if x.spans is None else x.spans.shape[1],
        C=chunk,
        scale=spec.softmax_scale,
        reverse=spec.reverse,
        by_head=x.gk is None and (x.g is not None or x.g_gamma is not None),
        by_feature=x.gk is not None,
        dtype=triton.language.bfloat16 if half else triton.language.float32,
        precision="ieee" if half or x.q.dtype == jnp.float32 or _launch.is_rocm() else "tf32x3",
        exact=x.q.dtype == jnp.float32,
        sums_by_product=half and _launch.compute_capability() < 100,
        of_space=of_space,
    )


class StateSpace(NamedTuple):
    """What a state space adds to the recurrence: h_t = exp(g_t) h_{t−1} + dt_t k_t v_tᵀ, o_t = q_tᵀ h_t + skip v_t.

    dt [b,s,h] and skip [b,h], of any float dtype. With them states that are operands or results are [b,n,h,e,d].
    """

    dt: Any = None
    skip: Any = None


class Places(NamedTuple):
    """The places of the sequences of a packed call, all None in a dense one.

    first, length, chunk [b,n]: the first token in time, the number of tokens and the first chunk of each sequence.
    owner [b,chunks]: the sequence of each chunk, n for a chunk of none.
    covered [b,s]: whether a token is in any sequence.
    """

    first: Any = None
    length: Any = None
    chunk: Any = None
    owner: Any = None
    covered: Any = None


def places_of(x: Operands, problem: Problem) -> Places:
    """The `Places` of a call."""
    if x.spans is None:
        return Places()
    spans = jnp.broadcast_to(x.spans, (problem.B, problem.N, 2))
    begin, after = spans[..., 0], spans[..., 1]
    length = after - begin
    ends = jnp.cumsum((length + problem.C - 1) // problem.C, axis=1, dtype=np.int32)
    chunk = ends - (length + problem.C - 1) // problem.C
    number = jnp.arange(problem.chunks, dtype=np.int32)
    owner = jax.vmap(entries_until, (0, None))(ends, number)
    mark = lambda begin, after: jnp.zeros(problem.S + 1, np.int32).at[begin].add(1).at[after].add(-1)
    covered = jnp.cumsum(jax.vmap(mark)(begin, after), axis=1)[:, :-1] > 0
    return Places(after - 1 if problem.reverse else begin, length, chunk, owner, covered)


def gamma_of_batch(x: Operands, batch: int) -> Operands:
    """x with g_gamma broadcast to [b,h]."""
    return x if x.g_gamma is None else x._replace(g_gamma=jnp.broadcast_to(x.g_gamma, (batch, x.g_gamma.shape[1])))


def repeated(x: Any, parts: int) -> Any:
    """Repeats each row for its parts, [b,…] -> [b·parts,…]."""
    return None if x is None else jnp.repeat(x, parts, axis=0)


def zero_elsewhere(x: Any, places: Places) -> Any:
    """x [b,s,…] with 0 for tokens outside of all sequences, which no program writes."""
    if places.covered is None:
        return x
    return jnp.where(jax.lax.expand_dims(places.covered, range(2, x.ndim)), x, 0)


def padded(size: int) -> int:
    """The width of a tile for `size` features: a power of two, at least the 16 that a matrix unit takes."""
    return max(16, triton.next_power_of_2(size))
