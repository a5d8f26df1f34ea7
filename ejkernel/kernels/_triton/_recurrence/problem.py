"""The compile-time constants of the kernels of the linear recurrence, and where the sequences of a packed call are."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton

from ejkernel.kernels._triton import _launch
from ejkernel.primitives._recurrence import Operands, RecurrenceSpec


@dataclass(frozen=True)
class Problem:
    """The shapes and options of one call, as a compile-time constant.

    Attributes:
        B, S, H: batch, tokens, and heads of the state.
        HQ, HK, HV: heads of queries, keys and values, each of which are H or shared by groups of those.
        D, V: the two feature sizes.
        N: sequences in a packed call, None in a dense one.
        C: tokens of a chunk.
        scale: the factor of q.
        reverse: time runs from the last token to the first.
        by_head: there is a decay for each head, whether it varies with the token or not.
        by_feature: there is a decay for each key feature.
        dtype: of products, a name of Triton's.
        precision: of products in float32.
        exact: the inputs are float32: no sum of decays may be the difference of longer ones.
        sums_by_product: running sums of decays in bfloat16 are products with ones. Triton 3.6 fails to compile that for
            Blackwell.
        transposed: states lie in memory as [V, D].
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
        """From a token to the next in time."""
        return -1 if self.reverse else 1

    @property
    def chunks(self) -> int:
        """How many chunks a row of the batch is cut into; in a packed call each sequence may end in one not full."""
        return triton.cdiv(self.S, self.C) if self.N is None else (self.S + self.N * (self.C - 1)) // self.C

    @property
    def weight_parts(self) -> int:
        """Parts in which weights are factors of a product: rounded, what rounding left, …

        Where features decay, q and k are rounded once more than elsewhere, and one rounding less has to make up for it.
        """
        return 2 if self.by_feature and self.dtype == triton.language.bfloat16 else 1

    @property
    def of_values(self) -> "Problem":
        """The same with the features of values in the place of those of keys, where decays of them are given.

        Then every head of the state has queries of its own.
        """
        sizes = dict(D=self.V, V=self.D, HK=self.HV, HV=self.HK)
        return replace(self, **sizes, by_head=False, by_feature=True, transposed=not self.transposed)

    @property
    def D_PAD(self) -> int:
        return padded(self.D)

    @property
    def V_PAD(self) -> int:
        return padded(self.V)


def problem_of(x: Operands, spec: RecurrenceSpec, chunk: int, *, wide: bool = False) -> Problem:
    """The problem that a call poses.

    Products of float16, all where values decay, and all that are to be `wide`, are computed in three of TF32, on AMD in
    float32: the range of float16 is too small for decays, and bfloat16 too coarse for both factors of a product.
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
    )


class Places(NamedTuple):
    """Of a packed call, None in a dense one.

    first, length, chunk [b,n]: the first token in time, the number of tokens and the first chunk of each sequence.
    owner [b,chunks]: the sequence of each chunk, n where there is none. covered [b,s]: the tokens of any sequence.
    """

    first: Any = None
    length: Any = None
    chunk: Any = None
    owner: Any = None
    covered: Any = None


def places_of(x: Operands, problem: Problem) -> Places:
    """Where the sequences of a call are."""
    if x.spans is None:
        return Places()
    spans = jnp.broadcast_to(x.spans, (problem.B, problem.N, 2))
    begin, after = spans[..., 0], spans[..., 1]
    length = after - begin
    ends = jnp.cumsum((length + problem.C - 1) // problem.C, axis=1, dtype=np.int32)
    chunk = ends - (length + problem.C - 1) // problem.C
    find = lambda ends: jnp.searchsorted(ends, jnp.arange(problem.chunks, dtype=np.int32), side="right")
    owner = jax.vmap(find)(ends).astype(np.int32)
    mark = lambda begin, after: jnp.zeros(problem.S + 1, np.int32).at[begin].add(1).at[after].add(-1)
    covered = jnp.cumsum(jax.vmap(mark)(begin, after), axis=1)[:, :-1] > 0
    return Places(after - 1 if problem.reverse else begin, length, chunk, owner, covered)


def gamma_of_batch(x: Operands, batch: int) -> Operands:
    """x with g_gamma [b,h], which may have been the same for the whole batch."""
    return x if x.g_gamma is None else x._replace(g_gamma=jnp.broadcast_to(x.g_gamma, (batch, x.g_gamma.shape[1])))


def repeated(x: Any, parts: int) -> Any:
    """[b,…] -> [b·parts,…]."""
    return None if x is None else jnp.repeat(x, parts, axis=0)


def zero_elsewhere(x: Any, places: Places) -> Any:
    """[b,s,…] with 0 for tokens of no sequence, which no program writes."""
    if places.covered is None:
        return x
    return jnp.where(jax.lax.expand_dims(places.covered, range(2, x.ndim)), x, 0)


def padded(size: int) -> int:
    """The width of a tile that holds `size` features: a power of two that a matrix unit takes."""
    return max(16, triton.next_power_of_2(size))
