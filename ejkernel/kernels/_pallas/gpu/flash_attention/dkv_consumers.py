"""The dK/dV consumer warpgroups of the backward, and the plan that all of its warpgroups follow."""

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
    arrive,
    broadcast_columns,
    load_vector,
    opaque_barrier,
    opaque_copy,
    stage_of,
    sync,
)
from .configs import columns_of_keys
from .dq_semaphore import MOST_IN_GROUP
from .feature_tiles import Tiles
from .head_dims import parts_of
from .mask_info import MaskInfo
from .problem import Problem, blocks_of_band
from .tile_scheduler import SingleTileScheduler
from .tiles import View, logits, visible, weights_of_lse

# Two consumers of dK and dV; the third warpgroup loads, and accumulates dQ.
WARPGROUPS = 3
# Named barriers: k and v may be overwritten, and then have been; p is full, and empty; then the empty stages of q, and
# the full ones of ds.
DONE = STORED = FIRST_BARRIER
P_FULL, P_EMPTY = DONE + 1, DONE + 2
Q_EMPTY = P_EMPTY + 1
# Queries that are computed at once where registers are scarce.
FEW = 32


@dataclass(frozen=True)
class Plan:
    """A problem, its blocks of queries, how many of them are in flight, and where this block of threads works.

    deterministic: dq is added up in a certain order (dq_semaphore.py). listed: lists say which blocks of queries there
    are.
    """

    problem: Problem
    block_q: int
    stages: int
    deterministic: bool = False
    listed: bool = False
    processors: int = field(default_factory=lambda: gpu_target().core_count)

    @property
    def tiles(self) -> int:
        """Tiles of keys of a head."""
        return -(-self.problem.K // self.keys)

    @property
    def blocks(self) -> int:
        """Blocks of queries of a head."""
        return -(-self.problem.S // self.block_q)

    @property
    def circular(self) -> bool:
        """Tiles begin with different blocks of queries, all of which they see, and come to the first after the last."""
        return self.deterministic and not self.problem.cut

    @property
    def signals_late(self) -> bool:
        """An addition to dq is counted when the next is computed: who waits for it is two steps behind."""
        return self.keys >= 2 * self.block_q

    @property
    def group(self) -> int:
        """The tiles that wait for one another in a circle."""
        return -(-self.tiles // -(-self.tiles // min(self.processors, MOST_IN_GROUP)))

    @property
    def wide(self) -> bool:
        """A warpgroup has no registers for dk beside dv, nor two for dk and dv of more than 64 keys."""
        return columns_of_keys(self.problem.D, self.problem.V) > 320

    @property
    def parts(self) -> list[slice]:
        """Of a block of queries those that are computed at once: beside dk and dv of 320 features half of them."""
        size = FEW if 256 < columns_of_keys(self.problem.D, self.problem.V) <= 320 else self.block_q
        return [slice(begin, begin + size) for begin in range(0, self.block_q, size)]

    @property
    def widest(self) -> int:
        """The widest row of what is multiplied: products sum over the queries of a part, see `launch.shared`."""
        return FEW if len(self.parts) > 1 else ROWS

    @property
    def D_parts(self) -> tuple[slice, ...]:
        """Of q and k, with whose parts ds is multiplied."""
        return parts_of(self.problem.D, self.widest, even=True)

    @property
    def V_parts(self) -> tuple[slice, ...]:
        return parts_of(self.problem.V, self.widest)

    @property
    def dq_chunks(self) -> list[slice]:
        """The features of dq that are computed and added to device memory at once."""
        width = self.problem.D if self.problem.D <= 128 else ROWS
        return [slice(begin, min(begin + width, self.problem.D)) for begin in range(0, self.problem.D, width)]

    @property
    def key_blocks(self) -> int:
        """Blocks of 64 stationary keys."""
        return 1 if self.wide else 2

    @property
    def keys(self) -> int:
        return self.key_blocks * ROWS

    @property
    def ds_stages(self) -> int:
        return 1 if self.wide else 2

    @property
    def ds_full(self) -> int:
        return Q_EMPTY + self.stages

    @property
    def scheduler(self) -> SingleTileScheduler:
        """All tiles of a head at about the same time: their queries and dq stay in the L2 cache.

        Under a causal mask the first keys have most to do. In a certain order the last are the first to add to dq, and
        the first groups of all heads come before the second ones.
        """
        heads, tiles = self.problem.G * self.problem.B, self.tiles
        if self.circular:
            heads, tiles = heads * -(-tiles // self.group), self.group
        return SingleTileScheduler(
            tiles,
            heads,
            together=1,
            rising=self.deterministic and not self.circular,
            processors=self.processors,
            evens_out=not self.deterministic,
        )

    def tile(self) -> tuple[Array, Array, Array]:
        """The first key, the key/value head and the batch index; of a group that is not full a key after the last."""
        place, head = self.scheduler.tile(lax.axis_index("block"))
        heads = jnp.int32(self.problem.G)
        if self.circular:
            of_all = heads * self.problem.B
            place, head = lax.div(head, of_all) * self.group + place, lax.rem(head, of_all)
        return place * self.keys, lax.rem(head, heads), lax.div(head, heads)

    def block_range(self, mask_info: MaskInfo | None) -> BlockRanges:
        """Found again wherever it is needed: the warpgroups have no registers to remember it in."""
        first, kv_head, batch = self.tile()
        if mask_info is not None:
            return mask_info.block_range(lax.div(first, jnp.int32(self.keys)), batch, kv_head)
        return blocks_of_band(first, self.keys, *self.problem.band(of_keys=True), self.problem.S, self.block_q)

    def steps(self, mask_info: MaskInfo | None) -> Array:
        """Blocks of queries of all the heads that share the keys."""
        block_range = self.block_range(mask_info)
        steps = (block_range.end - block_range.begin) * (1 if self.listed else self.problem.group)
        return jnp.where(self.tile()[0] < self.problem.K, steps, 0) if self.circular else steps

    def place(self, mask_info: MaskInfo | None, step: Array) -> tuple[Array, Array]:
        """The block of queries and the head of a step: one head of the group after the other.

        A list is that of a head of k and v, and has the blocks of all heads of its group, numbered head by head.
        """
        first, kv_head, batch = self.tile()
        if self.listed:
            block = mask_info.block(step, lax.div(first, jnp.int32(self.keys)), batch, kv_head)
            blocks = jnp.int32(self.blocks)
            return lax.rem(block, blocks), kv_head * self.problem.group + lax.div(block, blocks)
        block_range = self.block_range(mask_info)
        blocks = block_range.end - block_range.begin
        block, head = block_range.begin + lax.rem(step, blocks), kv_head * self.problem.group + lax.div(step, blocks)
        if self.circular:
            _, number, tiles = self._in_group(first)
            block = lax.rem(block + lax.div(number * self.blocks, tiles), jnp.int32(self.blocks))
        return block, head

    def rank(self, ranks: Array | None, block: Array) -> Array:
        """How many tiles of keys add to the dq of a block of queries before this one does (dq_semaphore.py)."""
        first, _, batch = self.tile()
        tile = lax.div(first, jnp.int32(self.keys))
        if ranks is not None:
            return ranks[batch if ranks.shape[0] > 1 else 0, tile, block]
        if not self.circular:
            last, high = jnp.int32(self.tiles - 1), self.problem.high
            if high is not None:
                last = jnp.minimum(last, lax.div((block + 1) * self.block_q - 1 + high, jnp.int32(self.keys)))
            return last - tile
        before, number, tiles = self._in_group(first)
        last = lax.div((block + 1) * tiles - 1, jnp.int32(self.blocks))
        return before + lax.rem(last - number + tiles, tiles)

    def _in_group(self, first: Array) -> tuple[Array, Array, Array]:
        """How many tiles are before the group of that with this first key; its number in the group, and of how many."""
        tile, group = lax.div(first, jnp.int32(self.keys)), jnp.int32(self.group)
        before = lax.div(tile, group) * group
        return before, tile - before, jnp.minimum(group, self.tiles - before)


# ---- The parts of a step


def _compute_p(
    plan: Plan, key_block: Array | int, mask_info: MaskInfo | None, kv_tiles, streamed, step: Array, part: slice
) -> tuple[Array, Array]:
    """p = exp(s − lse) of a block of 64 keys and a part of a step's queries, and p times a softcap's slope.

    With t = tanh(scale·q·k / softcap) the logit is s = softcap·t, and its slope is 1 − t² of that of scale·q·k.
    """
    problem, stage, (first, _, batch) = plan.problem, stage_of(step, plan.stages), plan.tile()
    uneven_keys = problem.K % plan.keys > 0 and (mask_info is None or plan.listed)

    def masked(exponents, block):
        view = View(batch, first + key_block * ROWS, mask_info, of_keys=True)
        ok = visible(view, block * plan.block_q + part.start, exponents.shape, uneven_keys, problem)
        return jnp.where(ok, exponents, -jnp.inf)

    def scoped(s):
        start = broadcast_columns(load_vector(streamed[2].at[stage, part], PER_COLUMN), s)
        if problem.softcap is None:
            s[...] = start
        for of_k, of_q in zip(kv_tiles[0].parts, streamed[0].parts, strict=True):
            plgpu.wgmma(s, of_k.at[key_block], of_q.at[stage, part].T)
        t = logits(s[...], problem)
        exponents = t * problem.exponent + (0 if problem.softcap is None else start)
        if uneven_keys or problem.cut:
            block_range, (block, _) = plan.block_range(mask_info), plan.place(mask_info, step)
            place = step if plan.listed else block
            whole = (place >= block_range.full_begin) & (place < block_range.full_end)
            if uneven_keys:
                whole &= first + plan.keys <= problem.K
            exponents = lax.cond(whole, lambda: exponents, lambda: masked(exponents, block))
        p = weights_of_lse(exponents)
        weights = (p,) if problem.softcap is None else (p, p * (1 - t * t))
        return tuple(x.astype(problem.dtype) for x in weights)

    weights = lax.optimization_barrier(pl.run_scoped(scoped, _square(part)))
    return weights[0], weights[-1]


def _issue_dp(key_block: Array | int, kv_tiles, streamed, stage: Array, part: slice, dp) -> None:
    """Issues dp − delta."""
    dp[...] = broadcast_columns(load_vector(streamed[3].at[stage, part], PER_COLUMN), dp)
    for of_v, of_do in zip(kv_tiles[1].parts, streamed[1].parts, strict=True):
        plgpu.wgmma(dp, of_v.at[key_block], of_do.at[stage, part].T)


def _issue_gradient(acc, weights: Array, tiles: Tiles, stage: Array, part: slice) -> None:
    """Issues what a part of a step's queries adds to dv, of p and do, or to dk, of ds and q."""
    for of_acc, tile in zip(tiles.columns_of(acc), tiles.parts, strict=True):
        plgpu.wgmma(of_acc, weights, tile.at[stage, part])


def _store_ds(ds: Array, key_block: Array | int, ds_tiles, ds_empty, step: Array, part: slice, plan: Plan) -> None:
    """Stores a part of ds in shared memory, for the warpgroup that accumulates dQ."""
    stage = stage_of(step, plan.ds_stages)
    if part == plan.parts[0]:
        pl.when(step >= plan.ds_stages)(lambda: plgpu.barrier_wait(ds_empty.at[stage]))
    ds_tiles[stage, key_block, :, part] = ds
    if part == plan.parts[-1]:
        plgpu.commit_smem()
        arrive(plan.ds_full + stage, plan.key_blocks + 1)


def _square(part: slice):
    return accumulator(ROWS, part.stop - part.start)


# ---- The warpgroups: each returns the gradients of its keys after all steps, dk without the scale


def dk_dv_consumer(plan: Plan, mask_info: MaskInfo | None, kv_tiles, streamed, ds_tiles, p_tile, barriers, dk, dv):
    """Up to 320 features: each of two warpgroups has its own keys, and both gradients."""
    del p_tile
    (q_full, do_full, ds_empty), number = barriers, lax.axis_index("warpgroup")

    def compute(step, _):
        stage = stage_of(step, plan.stages)
        plgpu.barrier_wait(q_full.at[stage])
        for part in plan.parts:
            key_block = number if len(plan.parts) == 1 else opaque_copy(number)
            p, p_sloped = _compute_p(plan, key_block, mask_info, kv_tiles, streamed, step, part)
            if part == plan.parts[0]:
                plgpu.barrier_wait(do_full.at[stage])

            opaque_barrier(p)

            def scoped(dp, key_block=key_block, part=part, p=p, p_sloped=p_sloped):
                _issue_dp(key_block, kv_tiles, streamed, stage, part, dp)
                _issue_gradient(dv, p, streamed[1], stage, part)
                dp = plgpu.wgmma_accumulator_load(dp, wait_n=len(streamed[1].parts))
                return (p_sloped.astype(jnp.float32) * dp).astype(plan.problem.dtype)

            ds = pl.run_scoped(scoped, _square(part))
            _issue_gradient(dk, ds, streamed[0], stage, part)
            _store_ds(ds, key_block, ds_tiles, ds_empty, step, part, plan)
            plgpu.wgmma_wait(0)
        arrive(Q_EMPTY + stage, WARPGROUPS)

    lax.fori_loop(0, plan.steps(mask_info), compute, None)
    return dk[...], dv[...]


def dv_consumer(plan: Plan, mask_info: MaskInfo | None, kv_tiles, streamed, ds_tiles, p_tile, barriers, dv):
    """More features: the first warpgroup computes p and dv …"""
    del ds_tiles
    (q_full, do_full, _), (part,) = barriers, plan.parts

    def compute(step, _):
        stage = stage_of(step, plan.stages)
        plgpu.barrier_wait(q_full.at[stage])
        p, p_sloped = _compute_p(plan, 0, mask_info, kv_tiles, streamed, step, part)
        plgpu.barrier_wait(do_full.at[stage])
        _issue_gradient(dv, p, streamed[1], stage, part)
        pl.when(step > 0)(lambda: sync(P_EMPTY, 2))
        p_tile[0] = p_sloped
        arrive(P_FULL, 2)
        plgpu.wgmma_wait(0)
        arrive(Q_EMPTY + stage, WARPGROUPS)

    lax.fori_loop(0, plan.steps(mask_info), compute, None)
    return (dv[...],)


def dk_consumer(plan: Plan, mask_info: MaskInfo | None, kv_tiles, streamed, ds_tiles, p_tile, barriers, dk):
    """… and the second, of the same keys, ds and dk."""
    (q_full, do_full, ds_empty), (part,), last = barriers, plan.parts, plan.steps(mask_info) - 1

    def compute(step, _):
        stage = stage_of(step, plan.stages)
        plgpu.barrier_wait(do_full.at[stage])

        def scoped(dp):
            _issue_dp(0, kv_tiles, streamed, stage, part, dp)
            sync(P_FULL, 2)
            p = p_tile[0]
            pl.when(step < last)(lambda: arrive(P_EMPTY, 2))
            return (p.astype(jnp.float32) * dp[...]).astype(plan.problem.dtype)

        ds = pl.run_scoped(scoped, _square(part))
        plgpu.barrier_wait(q_full.at[stage])
        _issue_gradient(dk, ds, streamed[0], stage, part)
        _store_ds(ds, 0, ds_tiles, ds_empty, step, part, plan)
        plgpu.wgmma_wait(0)
        arrive(Q_EMPTY + stage, WARPGROUPS)

    lax.fori_loop(0, plan.steps(mask_info), compute, None)
    return (dk[...],)
