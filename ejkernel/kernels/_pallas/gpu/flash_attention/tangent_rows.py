"""The mainloop of a consumer warpgroup of the tangent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._inline.products import Term, awaited, product
from .._launch import ROWS, WGMMA, arrive, broadcast_rows, full, opaque_copy, stage_of
from . import plan as forward_plan
from .configs import MOST_BESIDE_Q
from .plan import Q_EMPTY
from .problem import BlockRanges, after_first
from .tiles import COLUMNS, View, logits, thread_partial_row_sums, visible, weights_of_lse


class Tensors(NamedTuple):
    """The arrays; None where a tangent is zero."""

    q: Any
    k: Any
    v: Any
    q_dot: Any
    k_dot: Any
    v_dot: Any


class Ring(NamedTuple):
    """A ring of stages in shared memory, through which the blocks of some tensors are streamed.

    groups: names of tensors, whose blocks share a stage, in the order of a step. stages: how many there are. empty: the
    named barrier of the first. tiles: for each tensor of a group [stages, keys, features]. full: the barriers.
    """

    groups: tuple[tuple[str, ...], ...]
    stages: int
    empty: int
    tiles: Sequence[Any]
    full: Any

    def stage(self, group: tuple[str, ...], step: Array) -> Array:
        return stage_of(step * len(self.groups) + self.groups.index(group), self.stages)


@dataclass(frozen=True)
class Plan(forward_plan.Plan):
    """As in the forward, with a thread block for each tile, and tangents beside keys and values."""

    @property
    def persistent(self) -> bool:
        return False

    @property
    def bytes_of_a_key(self) -> int:
        return 2 * super().bytes_of_a_key

    @property
    def wide(self) -> bool:
        """Whether q and the weights of two blocks exceed the registers of a thread, beside its accumulator."""
        return self.problem.V > MOST_BESIDE_Q

    def rings(self, tensors: Tensors) -> list[tuple[tuple[str, ...], ...]]:
        """The groups of each ring: one of keys and one of values, or one of all where shared memory is short."""
        keys, values = (
            tuple(name for name in names if getattr(tensors, name) is not None)
            for names in (("k", "k_dot"), ("v", "v_dot"))
        )
        return [tuple((name,) for name in keys + values)] if self.wide else [(keys,), (values,)]


class Sums(NamedTuple):
    """Row sums: acc = Σ p·ṡ·v + p·v̇, and the partial sums of a thread of Σ p·ṡ, before and after rounding p·ṡ."""

    acc: Array
    moved: Array
    rounded_moved: Array

    @classmethod
    def zeros(cls, features: int) -> "Sums":
        return cls(*(full((ROWS, columns), 0.0, WGMMA) for columns in (features, COLUMNS, COLUMNS)))


@dataclass(frozen=True)
class Rows:
    """The rows of a warpgroup: their q and its tangent, what masks them, lse in base two, and the rings.

    Where the plan is wide, q and q_dot are the tiles of all warpgroups; else q is in registers.
    """

    plan: Plan
    q: Any
    q_dot: Any
    view: View
    block_range: BlockRanges
    lse: Array
    rings: Sequence[Ring]

    @property
    def keys_move(self) -> bool:
        return self._ring("k_dot") is not None

    @property
    def values_move(self) -> bool:
        return self._ring("v_dot") is not None

    @property
    def moves(self) -> bool:
        """Whether the weights have tangents."""
        return self.q_dot is not None or self.keys_move

    def _ring(self, name: str) -> tuple[Ring, tuple[str, ...]] | None:
        return next(((ring, group) for ring in self.rings for group in ring.groups if name in group), None)

    def tile(self, name: str, step: Array) -> Any:
        """A tile of a stage, whose full barrier is waited for with the first tensor of its group."""
        ring, group = self._ring(name)
        stage = ring.stage(group, step)
        if name == group[0]:
            plgpu.barrier_wait(ring.full.at[stage])
        return ring.tiles[group.index(name)].at[stage]

    def release(self, names: Sequence[str], step: Array) -> None:
        """Arrives at the empty barriers of the groups that end with these."""
        for ring in self.rings:
            for group in ring.groups:
                if group[-1] in names:
                    arrive(ring.empty + ring.stage(group, step), self.plan.warpgroups)

    def own(self, tiles: Any) -> Any:
        """The tile of this warpgroup; its address is recomputed at every step, to save registers."""
        return tiles.at[opaque_copy(lax.axis_index("warpgroup"))]

    def ping_pong(self, begin: Callable[[], Any]) -> Any:
        return self.plan.ping_pong(lax.axis_index("warpgroup"), begin)

    def plus(self, acc: Array, term: Term) -> Array:
        """acc + a·b, issued in ping-pong."""
        return awaited(0, self.ping_pong(lambda: product(acc, [term])))[0]

    @property
    def zeros(self) -> Array:
        """The accumulator of a product with a block of keys."""
        return jnp.zeros((ROWS, self.plan.block_k))

    def weights(self, s: Array, step: Array, masked: bool) -> tuple[Array, ...]:
        """p, and with a softcap p times its slope 1 − t², where softcap·t is the logit."""
        problem = self.plan.problem
        t = logits(s, problem)
        ok = self._visible(step, s.shape, masked)
        t = t if ok is None else jnp.where(ok, t, -jnp.inf)
        p = weights_of_lse(t * problem.exponent - broadcast_rows(self.lse, t))
        if problem.softcap is None:
            return (p,)
        return p, p * (1 - t * t) if ok is None else jnp.where(ok, p * (1 - t * t), 0.0)

    def moved(self, p: Array, s_dot: Array, step: Array, masked: bool) -> Array:
        """p·ṡ, of the weights times the slope of a softcap."""
        p_dot = p * s_dot * self.plan.problem.scale
        if self.view.mask_info is None and not self.plan.problem.masks_queries:
            return p_dot
        ok = self._visible(step, s_dot.shape, masked)
        return p_dot if ok is None else jnp.where(ok, p_dot, 0.0)  # q, k or their tangents may be NaN

    def _visible(self, step: Array, shape: tuple[int, int], masked: bool) -> Array | None:
        if not masked:
            return None
        problem, block_k = self.plan.problem, self.plan.block_k
        first_key = (self.block_range.end - 1 - step) * block_k
        return visible(self.view, first_key, shape, problem.K % block_k > 0, problem)


def accumulate(rows: Rows) -> Sums:
    """The sums of rows whose q is in registers: products with keys run beside those with the values before them."""
    plan, problem = rows.plan, rows.plan.problem
    operands = lambda *weights: [x.astype(problem.dtype) for x in weights]

    def weigh(s, s_dot, sums, step, masked):
        """p, p·ṡ rounded, and the sums of p·ṡ with it."""
        moved, rounded_moved = sums
        weights = rows.weights(s, step, masked)
        p_dot = rows.moved(weights[-1], s_dot, step, masked)
        rounded = _rounded(p_dot, problem.dtype)
        return (
            weights[0],
            rounded,
            moved + thread_partial_row_sums(p_dot),
            rounded_moved + thread_partial_row_sums(rounded),
        )

    def compute(step, carry, masked):
        (acc, *moved), p, p_dot = carry

        def issue():
            qk = _issue_qk(rows, step)
            return qk, _issue_pv(rows, acc, p, p_dot, step - 1)

        qk, pv = rows.ping_pong(issue)
        products = awaited(1, *qk)
        rows.release(("k", "k_dot"), step)
        p, p_dot, *moved = weigh(*products, moved, step, masked)
        (acc,) = awaited(0, pv)
        rows.release(("v", "v_dot"), step - 1)
        return Sums(acc, *moved), *operands(p, p_dot)

    acc, *moved = Sums.zeros(problem.V)
    products = awaited(0, *rows.ping_pong(lambda: _issue_qk(rows, jnp.int32(0))))
    rows.release(("k", "k_dot"), jnp.int32(0))
    p, p_dot, *moved = weigh(*products, moved, jnp.int32(0), masked=True)
    carry = Sums(acc, *moved), *operands(p, p_dot)
    (acc, *moved), p, p_dot = after_first(rows.block_range, compute, carry, problem)
    arrive(Q_EMPTY, plan.warpgroups)
    last = rows.block_range.end - rows.block_range.begin - 1
    (acc,) = awaited(0, rows.ping_pong(lambda: _issue_pv(rows, acc, p, p_dot, last)))
    return Sums(acc, *moved)


def _issue_qk(rows: Rows, step: Array) -> tuple[Array, Array]:
    """Begins q·kᵀ, and its tangent q̇·kᵀ + q·k̇ᵀ."""
    k, terms = rows.tile("k", step), []
    s = product(rows.zeros, [Term(rows.q, k, transposed_b=True)])
    if rows.q_dot is not None:
        terms.append(Term(rows.q_dot, k, transposed_b=True))
    if rows.keys_move:
        terms.append(Term(rows.q, rows.tile("k_dot", step), transposed_b=True))
    return s, product(rows.zeros, terms) if terms else rows.zeros


def _issue_pv(rows: Rows, acc: Array, p: Array, p_dot: Array, step: Array) -> Array:
    """Begins acc + p·ṡ·v + p·v̇."""
    v, terms = rows.tile("v", step), []
    if rows.moves:
        terms.append(Term(p_dot, v))
    if rows.values_move:
        terms.append(Term(p, rows.tile("v_dot", step)))
    return product(acc, terms)


def accumulate_wide(rows: Rows) -> Sums:
    """The sums of rows for which there are few registers: one product after the other, each in ping-pong."""
    plan, problem = rows.plan, rows.plan.problem

    def compute(step, sums, masked):
        (acc, moved, rounded_moved), k = sums, rows.tile("k", step)
        of_keys = lambda q: product(rows.zeros, [Term(rows.own(q), k, transposed_b=True)])

        def begin():
            return of_keys(rows.q), rows.zeros if rows.q_dot is None else of_keys(rows.q_dot)

        s, s_dot = awaited(0, *rows.ping_pong(begin))
        rows.release(("k",), step)
        if rows.keys_move:
            term = Term(rows.own(rows.q), rows.tile("k_dot", step), transposed_b=True)
            s_dot = rows.plus(s_dot, term)
            rows.release(("k_dot",), step)
        weights = rows.weights(s, step, masked)
        p_dot = rows.moved(weights[-1], s_dot, step, masked)
        moved += thread_partial_row_sums(p_dot)
        p, p_dot = (lax.optimization_barrier(x.astype(problem.dtype)) for x in (weights[0], p_dot))
        rounded_moved += thread_partial_row_sums(p_dot.astype(jnp.float32))
        acc = rows.plus(acc, Term(p_dot, rows.tile("v", step)))
        rows.release(("v",), step)
        if rows.values_move:
            acc = rows.plus(acc, Term(p, rows.tile("v_dot", step)))
            rows.release(("v_dot",), step)
        return Sums(acc, moved, rounded_moved)

    sums = compute(jnp.int32(0), Sums.zeros(problem.V), masked=True)
    sums = after_first(rows.block_range, compute, sums, problem)
    arrive(Q_EMPTY, plan.warpgroups)
    return sums


def _rounded(x: Array, dtype: Any) -> Array:
    """x rounded to the dtype of products and widened to float32 again.

    An opaque step keeps ptxas from rounding numbers one by one, and from reusing the packed pairs as the operand of the
    next product: registers of an operand may not be written while a product before still reads its own.
    """
    return lax.optimization_barrier(lax.optimization_barrier(x.astype(dtype)).astype(jnp.float32))
