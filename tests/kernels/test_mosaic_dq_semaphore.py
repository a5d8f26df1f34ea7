"""The order in which thread blocks of the Hopper backward add to dq if its bits are to be deterministic: a simulation.

Every tile of keys of a head has a rank for each block of queries to which it adds. Thread blocks start in the order of
their numbers, as many at a time as a device has multiprocessors, and do step after step as soon as their rank is due.
"""

from collections import defaultdict, deque
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention.backward import with_splits
from ejkernel.kernels._pallas.gpu.flash_attention.backward_plan import Plan
from ejkernel.kernels._pallas.gpu.flash_attention.dq_semaphore import MOST_IN_GROUP, table_of_ranks
from ejkernel.kernels._pallas.gpu.flash_attention.key_tile import key_tile
from ejkernel.kernels._pallas.gpu.flash_attention.mask_info import mask_info_of
from ejkernel.kernels._pallas.gpu.flash_attention.problem import problem_of
from ejkernel.kernels._visibility import visibility_of
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands

CAUSAL = FlashAttentionSpec(causal=True, deterministic=True)
FULL = FlashAttentionSpec(deterministic=True)
SORTED = jnp.arange(2000).reshape(2, 1000) // 300
UNSORTED = jnp.asarray(np.random.default_rng(0).integers(-1, 4, (2, 24)).repeat(50, 1), jnp.int32)


def shaped(queries: int, keys: int, heads: int = 2, D: int = 128, **arrays) -> Operands:
    x = (jax.ShapeDtypeStruct((2, n, h, D), jnp.bfloat16) for n, h in ((queries, heads), (keys, 2), (keys, 2)))
    return Operands(*x, **arrays)


CALLS = {
    "causal": (shaped(2000, 2000), CAUSAL),
    "causal, grouped heads": (shaped(1000, 1000, heads=6), CAUSAL),
    "causal, more keys": (shaped(600, 2000), CAUSAL),
    "causal, more queries": (shaped(2000, 600), CAUSAL),
    "causal, wide": (shaped(1000, 1000, D=256), CAUSAL),
    "window": (shaped(2000, 2000), FlashAttentionSpec(causal=True, window=(300, None), deterministic=True)),
    "window, more keys": (
        shaped(600, 2000),
        FlashAttentionSpec(causal=True, window=(300, None), deterministic=True),
    ),
    "window of both sides": (shaped(2000, 2000), FlashAttentionSpec(window=(300, 200), deterministic=True)),
    "window of the past": (shaped(2000, 2000), FlashAttentionSpec(window=(None, 64), deterministic=True)),
    "window of what follows": (shaped(2000, 2000), FlashAttentionSpec(window=(64, None), deterministic=True)),
    "full": (shaped(2000, 2000), FULL),
    "full, grouped heads": (shaped(1000, 1000, heads=6), FULL),
    "full, more keys": (shaped(300, 2000), FULL),
    "full, more queries": (shaped(2000, 300), FULL),
    "full, wide": (shaped(1100, 1100, D=256), FULL),
    "full, groups of tiles": (shaped(1000, 2700), FULL),
    "segments": (
        shaped(
            1000,
            1000,
            q_segment_ids=jnp.arange(2000).reshape(2, 1000) // 300,
            kv_segment_ids=jnp.ones((2, 1000), jnp.int32),
        ),
        CAUSAL,
    ),
    "segments in any order": (shaped(1200, 1200, q_segment_ids=UNSORTED, kv_segment_ids=UNSORTED[:, ::-1]), FULL),
    "packed": (
        shaped(
            1000, 1000, cu_seqlens_q=jnp.array([[0, 90, 90, 700, 980]]), cu_seqlens_k=jnp.array([[0, 99, 99, 650, 970]])
        ),
        CAUSAL,
    ),
}
MULTIPROCESSORS = 16


@pytest.mark.parametrize("name", CALLS)
def test_the_semaphores_do_not_deadlock(name):
    x, spec = CALLS[name]
    _simulate(x, spec, Plan(problem_of(x, spec), 64, 2, deterministic=True, processors=MULTIPROCESSORS))


@pytest.mark.parametrize("name", CALLS)
def test_nor_do_those_of_splits(name):
    """Tiles of keys, if they are few, are split over several thread blocks; those in a circle all run at once."""
    x, spec = CALLS[name]
    plan = with_splits(Plan(problem_of(x, spec), 64, 2, deterministic=True, processors=1000))
    few = plan.tiles * plan.problem.G * plan.problem.B * 2 <= MOST_IN_GROUP
    two_sided = None not in (plan.problem.low, plan.problem.high)
    assert (plan.splits > 1) == (few if plan.circular else not two_sided)
    if plan.circular and plan.splits > 1:
        assert plan.scheduler.blocks <= MOST_IN_GROUP
    _simulate(x, spec, plan, MOST_IN_GROUP if plan.circular else MULTIPROCESSORS)


@pytest.mark.parametrize("name", ["causal", "causal, grouped heads", "causal, more keys", "segments", "packed"])
def test_splits_that_add_in_turn_run_side_by_side(name):
    """Each of four splits of a tile has a quarter of the blocks of queries, and waits for one of the tile before."""
    x, spec = CALLS[name]
    plan = Plan(problem_of(x, spec), 64, 2, deterministic=True)
    assert plan.in_tile_order
    steps, one_after_the_other = plan.blocks * plan.problem.group, plan.tiles
    assert _simulate(x, spec, replace(plan, splits=4), 1000) <= steps / 4 + one_after_the_other + 1


def _simulate(x, spec, plan, multiprocessors=MULTIPROCESSORS) -> int:
    """Checks that all steps are done, in rounds of at most one of each thread block that runs; their number."""
    mask_info = mask_info_of(visibility_of(x, spec).transposed(), plan.keys, plan.block_q)
    ranks = None if mask_info is None else table_of_ranks(mask_info, plan.blocks)
    additions = additions_of(plan, mask_info, ranks)

    due = defaultdict(list)
    for block in additions:
        for dq, rank in block:
            due[dq].append(rank)
    assert all(sorted(found) == list(range(len(found))) for found in due.values())

    counts, waiting, running, rounds = defaultdict(int), deque(map(deque, additions)), [], 0
    while waiting or running:
        rounds += 1
        while waiting and len(running) < multiprocessors:
            running.append(waiting.popleft())
        able = [block for block in running if not block or counts[block[0][0]] == block[0][1]]
        assert able, f"{len(running)} thread blocks wait for others that have not started, {len(waiting)}"
        for block in able:
            if block:
                counts[block.popleft()[0]] += 1
        running = [block for block in running if block]
    return rounds


def additions_of(plan: Plan, mask_info, ranks) -> list[list[tuple]]:
    """For each thread block, in the order of its steps, the dq to which it adds (batch, head, block) and its rank."""

    def of_step(keys, step):
        block, head = keys.place(step)
        return keys.batch, head, block, keys.rank(ranks, block)

    def of_block(_):
        keys, most = key_tile(plan, mask_info), plan.blocks * plan.problem.group
        return keys.steps(), jax.lax.map(partial(of_step, keys), jnp.arange(most, dtype=jnp.int32))

    blocks = plan.scheduler.blocks
    steps, places = jax.jit(jax.vmap(of_block, axis_name="block"))(jnp.arange(blocks))
    places = np.stack(places, -1).tolist()
    return [[(tuple(of[:3]), of[3]) for of in places[n][: steps[n]]] for n in range(blocks)]


def test_a_circle_of_tiles_keeps_step():
    """Without a mask all tiles of a head add at once, each to another block, and no tile waits."""
    x, spec = shaped(2048, 2048), FULL
    plan = Plan(problem_of(x, spec), 64, 2, deterministic=True, processors=MULTIPROCESSORS)
    additions = additions_of(plan, None, None)
    for head in (additions[n : n + plan.group] for n in range(0, len(additions), plan.group)):
        counts = defaultdict(int)
        for at_once in zip(*head, strict=True):
            assert all(counts[dq] == rank for dq, rank in at_once)
            for dq, _ in at_once:
                counts[dq] += 1
