"""The warpgroups of the backward that hold the gradients of keys in registers, and the plan that all of them follow."""

from dataclasses import dataclass, field

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._visibility import BlockRanges

from .._launch import (
    FIRST_BARRIER,
    PER_COLUMN,
    ROWS,
    accumulator,
    afresh,
    arrive,
    computed,
    down,
    load_vector,
    slot_of,
    sync,
)
from .mask_info import MaskInfo
from .order import Each
from .problem import Problem, blocks_of_band
from .tiles import View, logits, seen

# Two warpgroups hold the gradients of keys, the third loads and collects.
WARPGROUPS = 3
# Named barriers: k and v may be overwritten, and then have been; p is there, and has been read; and from here on the
# slots of q are free, and those of ds full.
DONE = STORED = FIRST_BARRIER
P_FULL, P_FREE = DONE + 1, DONE + 2
Q_FREE = P_FREE + 1
# Queries that are computed at once where registers are few.
FEW = 32


@dataclass(frozen=True)
class Plan:
    """A problem, its blocks of queries, how many of them are in flight, and where this block of threads works."""

    problem: Problem
    block_q: int
    stages: int
    processors: int = field(default_factory=lambda: gpu_target().core_count)

    @property
    def wide(self) -> bool:
        """A warpgroup has no room for dk beside dv, nor two for dk and dv of more than 64 keys."""
        return self.problem.D + self.problem.V > 320

    @property
    def parts(self) -> list[slice]:
        """Of a block of queries those that are computed at once: beside dk and dv of 320 features half of them."""
        size = FEW if 256 < self.problem.D + self.problem.V <= 320 else self.block_q
        return [slice(begin, begin + size) for begin in range(0, self.block_q, size)]

    @property
    def swizzle(self) -> int | None:
        """Of what is multiplied: products sum over the queries of a part, see `launch.shared`."""
        return FEW * self.problem.dtype.itemsize if len(self.parts) > 1 else None

    @property
    def holders(self) -> int:
        """Blocks of 64 keys that a block of threads holds."""
        return 1 if self.wide else 2

    @property
    def keys(self) -> int:
        return self.holders * ROWS

    @property
    def ds_stages(self) -> int:
        return 1 if self.wide else 2

    @property
    def ds_full(self) -> int:
        return Q_FREE + self.stages

    @property
    def order(self) -> Each:
        """All tiles of a head at about the same time: their queries and dq stay in the L2 cache.

        Under a causal mask the first keys have most to do.
        """
        tiles, heads = -(-self.problem.K // self.keys), self.problem.G * self.problem.B
        return Each(tiles, heads, together=1, rising=False, processors=self.processors)

    def tile(self) -> tuple[Array, Array, Array]:
        """The first key, the key/value head and the batch index."""
        place, head = self.order.tile(lax.axis_index("block"))
        heads = jnp.int32(self.problem.G)
        return place * self.keys, lax.rem(head, heads), lax.div(head, heads)

    def visited(self, mask_info: MaskInfo | None) -> BlockRanges:
        """Found again wherever it is needed: the warpgroups have no registers to remember it in."""
        first, _, batch = self.tile()
        if mask_info is not None:
            return mask_info.visited(lax.div(first, jnp.int32(self.keys)), batch)
        return blocks_of_band(first, self.keys, *self.problem.band(of_keys=True), self.problem.S, self.block_q)

    def steps(self, mask_info: MaskInfo | None) -> Array:
        """Blocks of queries of all the heads that share the keys."""
        visited = self.visited(mask_info)
        return (visited.end - visited.begin) * self.problem.group

    def place(self, mask_info: MaskInfo | None, step: Array) -> tuple[Array, Array]:
        """The block of queries and the head of a step: one head of the group after the other."""
        (_, kv_head, _), visited = self.tile(), self.visited(mask_info)
        blocks = visited.end - visited.begin
        return visited.begin + lax.rem(step, blocks), kv_head * self.problem.group + lax.div(step, blocks)


# ---- The parts of a step


def _weigh(
    plan: Plan, holder: Array | int, mask_info: MaskInfo | None, held, streamed, step: Array, part: slice
) -> tuple[Array, Array]:
    """p = exp(s − lse) of the keys of a holder and a part of a step's queries, and p times a softcap's slope.

    With t = tanh(scale·q·k / softcap) the logit is s = softcap·t, and its slope is 1 − t² of that of scale·q·k.
    """
    problem, slot, (first, _, batch) = plan.problem, slot_of(step, plan.stages), plan.tile()
    uneven_keys = problem.K % plan.keys > 0 and mask_info is None

    def masked(exponents, block):
        view = View(batch, first + holder * ROWS, mask_info, of_keys=True)
        ok = seen(view, block * plan.block_q + part.start, exponents.shape, uneven_keys, problem)
        return jnp.where(ok, exponents, -jnp.inf)

    def scoped(s):
        start = down(load_vector(streamed[2].at[slot, part], PER_COLUMN), s)
        if problem.softcap is None:
            s[...] = start
        plgpu.wgmma(s, held[0].at[holder], streamed[0].at[slot, part].T)
        t = logits(s[...], problem)
        exponents = t * problem.exponent + (0 if problem.softcap is None else start)
        if uneven_keys or problem.cut:
            visited, (block, _) = plan.visited(mask_info), plan.place(mask_info, step)
            whole = (block >= visited.full_begin) & (block < visited.full_end)
            if uneven_keys:
                whole &= first + plan.keys <= problem.K
            exponents = lax.cond(whole, lambda: exponents, lambda: masked(exponents, block))
        p = jnp.exp2(exponents)
        weights = (p,) if problem.softcap is None else (p, p * (1 - t * t))
        return tuple(x.astype(problem.dtype) for x in weights)

    weights = lax.optimization_barrier(pl.run_scoped(scoped, _square(part)))
    return weights[0], weights[-1]


def _begin_slopes(holder: Array | int, held, streamed, slot: Array, part: slice, dp) -> None:
    """Begins dp − delta."""
    dp[...] = down(load_vector(streamed[3].at[slot, part], PER_COLUMN), dp)
    plgpu.wgmma(dp, held[1].at[holder], streamed[1].at[slot, part].T)


def _hand_over(ds: Array, holder: Array | int, ds_tiles, ds_free, step: Array, part: slice, plan: Plan) -> None:
    """Gives a part of ds to the warpgroup that collects."""
    slot = slot_of(step, plan.ds_stages)
    if part == plan.parts[0]:
        pl.when(step >= plan.ds_stages)(lambda: plgpu.barrier_wait(ds_free.at[slot]))
    ds_tiles[slot, holder, :, part] = ds
    if part == plan.parts[-1]:
        plgpu.commit_smem()
        arrive(plan.ds_full + slot, plan.holders + 1)


def _square(part: slice):
    return accumulator(ROWS, part.stop - part.start)


# ---- The warpgroups: each returns the gradients of its keys after all steps, dk without the scale


def hold_both(plan: Plan, mask_info: MaskInfo | None, held, streamed, ds_tiles, p_tile, barriers, dk, dv):
    """Up to 320 features: each of two warpgroups has its own keys, and both gradients."""
    del p_tile
    (q_full, do_full, ds_free), number = barriers, lax.axis_index("warpgroup")

    def visit(step, _):
        slot = slot_of(step, plan.stages)
        plgpu.barrier_wait(q_full.at[slot])
        for part in plan.parts:
            holder = number if len(plan.parts) == 1 else afresh(number)
            p, p_sloped = _weigh(plan, holder, mask_info, held, streamed, step, part)
            if part == plan.parts[0]:
                plgpu.barrier_wait(do_full.at[slot])

            computed(p)

            def scoped(dp, holder=holder, part=part, p=p, p_sloped=p_sloped):
                _begin_slopes(holder, held, streamed, slot, part, dp)
                plgpu.wgmma(dv, p, streamed[1].at[slot, part])
                dp = plgpu.wgmma_accumulator_load(dp, wait_n=1)
                return (p_sloped.astype(jnp.float32) * dp).astype(plan.problem.dtype)

            ds = pl.run_scoped(scoped, _square(part))
            plgpu.wgmma(dk, ds, streamed[0].at[slot, part])
            _hand_over(ds, holder, ds_tiles, ds_free, step, part, plan)
            plgpu.wgmma_wait(0)
        arrive(Q_FREE + slot, WARPGROUPS)

    lax.fori_loop(0, plan.steps(mask_info), visit, None)
    return dk[...], dv[...]


def hold_values(plan: Plan, mask_info: MaskInfo | None, held, streamed, ds_tiles, p_tile, barriers, dv):
    """More features: the first warpgroup computes p and dv …"""
    del ds_tiles
    (q_full, do_full, _), (part,) = barriers, plan.parts

    def visit(step, _):
        slot = slot_of(step, plan.stages)
        plgpu.barrier_wait(q_full.at[slot])
        p, p_sloped = _weigh(plan, 0, mask_info, held, streamed, step, part)
        plgpu.barrier_wait(do_full.at[slot])
        plgpu.wgmma(dv, p, streamed[1].at[slot])
        pl.when(step > 0)(lambda: sync(P_FREE, 2))
        p_tile[0] = p_sloped
        arrive(P_FULL, 2)
        plgpu.wgmma_wait(0)
        arrive(Q_FREE + slot, WARPGROUPS)

    lax.fori_loop(0, plan.steps(mask_info), visit, None)
    return (dv[...],)


def hold_keys(plan: Plan, mask_info: MaskInfo | None, held, streamed, ds_tiles, p_tile, barriers, dk):
    """… and the second, of the same keys, ds and dk."""
    (q_full, do_full, ds_free), (part,), last = barriers, plan.parts, plan.steps(mask_info) - 1

    def visit(step, _):
        slot = slot_of(step, plan.stages)
        plgpu.barrier_wait(do_full.at[slot])

        def scoped(dp):
            _begin_slopes(0, held, streamed, slot, part, dp)
            sync(P_FULL, 2)
            p = p_tile[0]
            pl.when(step < last)(lambda: arrive(P_FREE, 2))
            return (p.astype(jnp.float32) * dp[...]).astype(plan.problem.dtype)

        ds = pl.run_scoped(scoped, _square(part))
        plgpu.barrier_wait(q_full.at[slot])
        plgpu.wgmma(dk, ds, streamed[0].at[slot])
        _hand_over(ds, 0, ds_tiles, ds_free, step, part, plan)
        plgpu.wgmma_wait(0)
        arrive(Q_FREE + slot, WARPGROUPS)

    lax.fori_loop(0, plan.steps(mask_info), visit, None)
    return (dk[...],)
