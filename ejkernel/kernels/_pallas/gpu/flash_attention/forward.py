"""The forward kernel: softmax(s)·v by the online softmax, with lse, after FlashAttention-3 (arXiv 2407.08608).

Of row i, after the blocks of keys seen so far:  m = max_j s_j,  l = Σ_j exp(s_j − m),  acc = Σ_j exp(s_j − m)·v_j.
A block with a maximum m' > m rescales l and acc by exp(m − m'). At the end o = acc / l and lse = m + log l.

A tile of queries belongs to two or three warpgroups, 64 rows each. A warpgroup has q·kᵀ of one block and the product of
weights and values of the block before under way at once, and computes the softmax of the one while the other ends. They
take turns in issuing products, so that one computes a softmax while another keeps the tensor cores busy. Keys come from
the last block down, so that what a causal mask cuts is met first.

As many blocks of threads as the device runs at once walk over the tiles, where shared memory has room for o beside the
next q; otherwise there is a block of threads for each tile. Tiles that see most keys come first.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .launch import (
    FIRST_BARRIER,
    PER_ROW,
    ROWS,
    WGMMA,
    accumulator,
    across,
    arrive,
    full,
    launch,
    shared,
    slot_of,
    sync,
    whole_eights,
)
from .problem import LOG2_E, Problem, Visits, after_first, problem_of, visits
from .reach import Reach, of_sequences, reach_of, without_unseen
from .tiles import Statistics, View, logits, seen, weights

# Streaming multiprocessors of an H100 or H200 (SXM), and the shared memory that a block of threads may use on one.
PROCESSORS, SHARED_BYTES = 132, 227 * 1024
# Registers of a thread that computes and of one that loads, by how many warpgroups compute.
REGISTERS = {2: (232, 40), 3: (160, 32)}
# Named barriers: q may be overwritten; and from here on the turns of the consumers, the slots of k, and those of v.
Q_FREE = FIRST_BARRIER
TURN = Q_FREE + 1


@dataclass(frozen=True)
class Plan:
    """A problem, its blocks, and how the tiles are dealt out."""

    problem: Problem
    block_q: int
    block_k: int
    stages: int

    @property
    def consumers(self) -> int:
        """Warpgroups that compute; one more loads."""
        return self.block_q // ROWS

    @property
    def warpgroups(self) -> int:
        return self.consumers + 1

    @property
    def q_tiles(self) -> int:
        return -(-self.problem.S // self.block_q)

    @property
    def tiles(self) -> int:
        return self.q_tiles * self.problem.H * self.problem.B

    @property
    def persistent(self) -> bool:
        return self.shared_bytes(persistent=True) <= SHARED_BYTES

    @property
    def blocks(self) -> int:
        return min(self.tiles, PROCESSORS) if self.persistent else self.tiles

    @property
    def k_free(self) -> int:
        return TURN + self.consumers

    @property
    def v_free(self) -> int:
        return self.k_free + self.stages

    def shared_bytes(self, persistent: bool) -> int:
        """Bytes of shared memory: the tiles, and room for the rest."""
        D, V = self.problem.D, self.problem.V
        held = self.block_q * (D + V if persistent else max(D, V))
        return (held + self.stages * self.block_k * (D + V)) * self.problem.dtype.itemsize + 2048

    def tile(self, turn: Array) -> tuple[Array, Array, Array]:
        """The first query, the head and the batch index of the tile that this block has in its `turn`.

        Every other turn runs backwards over the blocks, so that none has the longer tile of each.
        """
        number, blocks = lax.axis_index("block"), self.blocks
        if self.persistent:
            whole = (turn + 1) * blocks <= self.tiles
            number = jnp.where(whole & (lax.rem(turn, jnp.int32(2)) == 1), blocks - 1 - number, number)
            number += turn * blocks
        heads, batches = jnp.int32(self.problem.H), jnp.int32(self.problem.H * self.problem.B)
        i, batch_head = lax.div(number, batches), lax.rem(number, batches)
        if self.problem.high is not None:
            i = self.q_tiles - 1 - i
        return i * self.block_q, lax.rem(batch_head, heads), lax.div(batch_head, heads)

    def turns(self) -> Array:
        """How many tiles this block has."""
        if not self.persistent:
            return jnp.int32(1)
        return lax.div(self.tiles - 1 - lax.axis_index("block"), jnp.int32(self.blocks)) + 1

    def visits(self, first: Array, batch: Array, reach: Reach | None) -> Visits:
        if reach is not None:
            return reach.visits(lax.div(first, jnp.int32(self.block_q)), batch)
        return visits(first, self.block_q, self.problem.low, self.problem.high, self.problem.K, self.block_k)


def flash_attention(*operands: Array | None, spec: FlashAttentionSpec, config: KernelConfig) -> Outputs:
    operands = Operands(*operands)
    problem = problem_of(operands, spec)
    plan = Plan(problem, config.block_q, config.block_k, config.num_stages)
    dtype, stages = problem.dtype, plan.stages
    sinks = operands.sinks
    if sinks is not None:
        sinks = jnp.broadcast_to(jax.nn.logsumexp(sinks, axis=-1) * LOG2_E, (problem.B, problem.H))
    q, o = shared((plan.block_q, problem.D), dtype), shared((plan.consumers, ROWS, problem.V), dtype)
    (v,) = without_unseen(operands, spec, problem, operands.v)
    arrays = tuple(map(whole_eights, (operands.q, operands.k, v)))
    o, lse = launch(
        partial(_kernel, plan=plan),
        "flash_attention_forward",
        (arrays, sinks, reach_of(operands, spec, problem, plan.block_q, plan.block_k)),
        out_type=(
            jax.ShapeDtypeStruct((*arrays[0].shape[:3], problem.V), dtype),
            jax.ShapeDtypeStruct((problem.B, problem.H, plan.q_tiles * plan.block_q), jnp.float32),
        ),
        blocks=plan.blocks,
        warpgroups=plan.warpgroups,
        scratch=dict(
            q_and_o=(q, o) if plan.persistent else plgpu.RefUnion(q, o),
            k_tiles=shared((stages, plan.block_k, problem.D), dtype),
            v_tiles=shared((stages, plan.block_k, problem.V), dtype),
            lse_tile=plgpu.SMEM((plan.consumers, ROWS), jnp.float32),
            q_full=plgpu.Barrier(),
            k_full=plgpu.Barrier(num_barriers=stages),
            v_full=plgpu.Barrier(num_barriers=stages),
        ),
    )
    return Outputs(o[:, : problem.S], of_sequences(lse[:, :, : problem.S], operands))


def _kernel(
    arrays, sinks, reach: Reach | None, o, lse, *, plan: Plan,
    q_and_o, k_tiles, v_tiles, lse_tile, q_full, k_full, v_full,
):  # fmt: skip
    q_tile, o_tiles = q_and_o
    number = lax.axis_index("warpgroup")
    tiles = (q_tile, k_tiles, v_tiles), (q_full, k_full, v_full)

    def consume():
        plgpu.set_max_registers(REGISTERS[plan.consumers][0], action="increase")
        for slot in range(2 * plan.stages):
            arrive(plan.k_free + slot, plan.warpgroups)
        pl.when(number == plan.consumers - 1)(lambda: arrive(TURN, 2))

        def one(turn, step):
            first, head, batch = plan.tile(turn)
            visited = plan.visits(first, batch, reach)
            maximum = -jnp.inf if sinks is None else sinks[batch, head]
            total = 0.0 if sinks is None else jnp.where(maximum == -jnp.inf, 0.0, 1.0)
            start = Statistics(full((ROWS,), maximum, PER_ROW), full((ROWS,), total, PER_ROW))
            view = View(batch, first + number * ROWS, reach)
            acc, last, step = _attend(*tiles, view, visited, start, step, turn + 1 < plan.turns(), plan)
            if plan.persistent:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            elif plan.problem.D != plan.problem.V:
                sync(Q_FREE, plan.consumers)  # o lies over q of the other warpgroup
            saw = last.total > 0
            total = jnp.where(saw, last.total, 1.0)
            o_tiles[number] = (acc * across(1 / total, acc)).astype(plan.problem.dtype)
            lse_tile[number] = jnp.where(saw, (last.maximum + jnp.log2(total)) * (1 / LOG2_E), -jnp.inf)
            plgpu.commit_smem()
            rows = pl.ds(first + number * ROWS, ROWS)
            plgpu.copy_smem_to_gmem(o_tiles.at[number], o.at[batch, rows, head], commit_group=False)
            plgpu.copy_smem_to_gmem(lse_tile.at[number], lse.at[batch, head, rows], commit_group=False)
            plgpu.commit_smem_to_gmem_group()
            return step

        lax.fori_loop(0, plan.turns(), one, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    lax.cond(number < plan.consumers, consume, lambda: _load(arrays, *tiles, reach, plan))


def _load(arrays, tiles, full_barriers, reach: Reach | None, plan: Plan):
    """The warpgroup that loads: q of every tile, and its blocks of k and v into the slots as they come free."""
    (q, k, v), (q_tile, k_tiles, v_tiles), (q_full, k_full, v_full) = arrays, tiles, full_barriers
    plgpu.set_max_registers(REGISTERS[plan.consumers][1], action="decrease")

    def one(turn, step):
        first, head, batch = plan.tile(turn)
        visited = plan.visits(first, batch, reach)
        pl.when(turn > 0)(lambda: sync(Q_FREE, plan.warpgroups))
        plgpu.copy_gmem_to_smem(q.at[batch, pl.ds(first, plan.block_q), head], q_tile, q_full)

        def block(i, step):
            slot = slot_of(step, plan.stages)
            keys = pl.ds((visited.end - 1 - i) * plan.block_k, plan.block_k)
            at = batch, keys, lax.div(head, jnp.int32(plan.problem.group))
            sync(plan.k_free + slot, plan.warpgroups)
            plgpu.copy_gmem_to_smem(k.at[at], k_tiles.at[slot], k_full.at[slot])
            sync(plan.v_free + slot, plan.warpgroups)
            plgpu.copy_gmem_to_smem(v.at[at], v_tiles.at[slot], v_full.at[slot])
            return step + 1

        return lax.fori_loop(0, visited.end - visited.begin, block, step)

    lax.fori_loop(0, plan.turns(), one, jnp.int32(0))


def _attend(tiles, full_barriers, view: View, visited: Visits, start: Statistics, step: Array, more: Array, plan: Plan):
    """acc and the statistics of the rows of this warpgroup after all blocks, and the step of the pipeline by then."""
    (q_tile, k_tiles, v_tiles), (q_full, k_full, v_full) = tiles, full_barriers
    problem, number = plan.problem, lax.axis_index("warpgroup")
    mine = q_tile.at[pl.ds(number * ROWS, ROWS)]
    products = accumulator(ROWS, plan.block_k)
    my_turn, your_turn = partial(sync, TURN + number, 2), partial(arrive, TURN + slot_of(number + 1, plan.consumers), 2)

    def softmax(qk, before, i, masked):
        ok = None
        if masked:
            first_key = (visited.end - 1 - i) * plan.block_k
            ok = seen(view, first_key, qk.shape, problem.K % plan.block_k > 0, problem)
        return weights(logits(qk, problem), before, ok, problem)

    def begin(qk):
        my_turn()
        plgpu.wgmma(qk, mine, k_tiles.at[slot_of(step, plan.stages)].T)
        your_turn()
        return qk[...]

    plgpu.barrier_wait(q_full)
    plgpu.barrier_wait(k_full.at[slot_of(step, plan.stages)])
    p, statistics, _ = softmax(pl.run_scoped(begin, products), start, 0, True)
    arrive(plan.k_free + slot_of(step, plan.stages), plan.warpgroups)
    carry = full((ROWS, problem.V), 0.0, WGMMA), p.astype(problem.dtype), statistics

    def visit(i, carry, masked):
        acc, p, statistics = carry
        slot, before = slot_of(step + i, plan.stages), slot_of(step + i - 1, plan.stages)
        plgpu.barrier_wait(k_full.at[slot])

        def both(refs):
            acc, *results = refs

            def scoped(qk):
                my_turn()
                plgpu.wgmma(qk, mine, k_tiles.at[slot].T)
                plgpu.barrier_wait(v_full.at[before])
                plgpu.wgmma(acc, p, v_tiles.at[before])
                your_turn()
                s = plgpu.wgmma_accumulator_load(qk, wait_n=1)
                arrive(plan.k_free + slot, plan.warpgroups)
                for ref, value in zip(results, jax.tree.leaves(softmax(s, statistics, i, masked)), strict=True):
                    ref[...] = value
                plgpu.wgmma_wait(0)

            pl.run_scoped(scoped, products)

        room, rows = full((ROWS, plan.block_k), 0.0, WGMMA), statistics.total
        acc, weight, *found, fade = pl.run_state(both)((plgpu.ACC.init(acc), room, rows, rows, rows))
        arrive(plan.v_free + before, plan.warpgroups)
        return acc * across(fade, acc), weight.astype(problem.dtype), Statistics(*found)

    acc, p, statistics = after_first(visited, visit, carry, problem)
    count = visited.end - visited.begin
    if plan.persistent:
        pl.when(more)(lambda: arrive(Q_FREE, plan.warpgroups))
    last = slot_of(step + count - 1, plan.stages)
    plgpu.barrier_wait(v_full.at[last])
    my_turn()
    acc = pl.run_state(lambda acc: plgpu.wgmma(acc, p, v_tiles.at[last]))(plgpu.ACC.init(acc))
    your_turn()
    arrive(plan.v_free + last, plan.warpgroups)
    return acc, statistics, step + count
