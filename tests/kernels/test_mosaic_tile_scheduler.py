"""The tile schedulers of flash_attention on Hopper: every work tile once, and evenly distributed work."""

import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention.plan import Plan
from ejkernel.kernels._pallas.gpu.flash_attention.problem import problem_of
from ejkernel.kernels._pallas.gpu.flash_attention.tile_scheduler import (
    TILE_OVERHEAD,
    DynamicTileScheduler,
    PersistentTileScheduler,
    SingleTileScheduler,
)
from ejkernel.kernels._visibility import Visibility
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands

SCHEDULERS = [
    PersistentTileScheduler(tiles=8, heads=256, later_tiles_are_longer=True, processors=132),
    PersistentTileScheduler(tiles=8, heads=256, later_tiles_are_longer=False, processors=132),
    PersistentTileScheduler(tiles=7, heads=45, later_tiles_are_longer=True, processors=132),
    PersistentTileScheduler(tiles=9, heads=35, later_tiles_are_longer=True, processors=132),
    PersistentTileScheduler(tiles=3, heads=35, later_tiles_are_longer=True, processors=132),
    PersistentTileScheduler(tiles=1, heads=1, later_tiles_are_longer=True, processors=132),
    PersistentTileScheduler(tiles=64, heads=64, later_tiles_are_longer=True, processors=132, long=True),
    PersistentTileScheduler(tiles=43, heads=64, later_tiles_are_longer=False, processors=132, long=True),
    PersistentTileScheduler(tiles=100, heads=21, later_tiles_are_longer=True, processors=132, long=True),
    PersistentTileScheduler(tiles=8, heads=40, later_tiles_are_longer=True, processors=132, long=True),
    SingleTileScheduler(tiles=100, heads=10, together=4, later_tiles_are_longer=True, processors=132),
    SingleTileScheduler(tiles=100, heads=10, together=1, later_tiles_are_longer=False, processors=132),
    SingleTileScheduler(tiles=3, heads=5, together=1, later_tiles_are_longer=False, processors=132),
]


def work(scheduler) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The position, head and thread block of every tile."""
    longest_first = None if scheduler.longest_first is None else jnp.asarray(scheduler.longest_first)
    work_tiles = jax.vmap(lambda block: scheduler.work_tiles(block, longest_first))(
        np.arange(scheduler.blocks, dtype=np.int32)
    )
    work_tiles = np.broadcast_to(work_tiles, scheduler.blocks)
    block = np.repeat(np.arange(scheduler.blocks, dtype=np.int32), work_tiles)
    work_tile = np.concatenate([np.arange(n, dtype=np.int32) for n in work_tiles])
    return *map(
        np.asarray,
        jax.jit(jax.vmap(lambda block, work_tile: scheduler.tile(block, work_tile, longest_first)))(block, work_tile),
    ), block


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=repr)
def test_every_tile_is_scheduled_once(scheduler):
    place, head, _ = work(scheduler)
    assert len(place) == scheduler.tiles * scheduler.heads == len(set(zip(place.tolist(), head.tolist(), strict=True)))
    assert (place.min(), place.max(), head.min(), head.max()) == (0, scheduler.tiles - 1, 0, scheduler.heads - 1)


@pytest.mark.parametrize("tiles, heads", [(8, 256), (32, 64), (22, 64), (128, 16), (86, 16), (9, 310)])
def test_blocks_have_as_much_to_do(tiles, heads):
    """With as many blocks of keys for a tile as its position says, and one."""
    place, _, block = work(PersistentTileScheduler(tiles, heads, later_tiles_are_longer=True, processors=132))
    load = np.bincount(block, place + 1)
    assert load.max() <= 1.03 * load.mean()


def test_a_few_tiles_are_scheduled_as_well_as_can_be():
    """At most the longest tile, or one tile more than the mean."""
    for tiles, heads in ((7, 45), (16, 35), (3, 35), (1, 1)):
        place, _, block = work(PersistentTileScheduler(tiles, heads, later_tiles_are_longer=True, processors=132))
        load = np.bincount(block, place + 1)
        assert load.max() <= max(load.mean() * 4 / 3, tiles)


@pytest.mark.parametrize("late", [0, 4, 16, 32])
@pytest.mark.parametrize("later_tiles_are_longer", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("tiles, heads", [(64, 64), (128, 64), (86, 32)])
def test_a_long_launch_shares_the_device(tiles, heads, later_tiles_are_longer, late):
    """Another stream keeps `late` multiprocessors for the whole launch: in one wave it would take twice its time."""

    def time(long, late):
        place, _, block = work(PersistentTileScheduler(tiles, heads, later_tiles_are_longer, 132, long))
        free = [0.0] * (132 - late)
        for load in np.bincount(block, place + 1 if later_tiles_are_longer else np.ones_like(place)):
            heapq.heappushpop(free, free[0] + load)
        return max(free)

    alone = time(False, 0)
    assert time(True, late) <= 1.12 * alone * 132 / (132 - late)
    assert late == 0 or time(False, late) > 1.9 * alone


def test_few_heads_at_a_time():
    """Four thread blocks begin with tiles of one head; except at the end, some heads end before others begin."""
    place, head, block = work(PersistentTileScheduler(tiles=8, heads=256, later_tiles_are_longer=True, processors=132))
    first = np.unique(block, return_index=True)[1]
    assert len(set(head[first].tolist())) == 33 and set(place[first].tolist()) == {4, 5, 6, 7}
    _, head, _ = work(SingleTileScheduler(tiles=100, heads=10, together=2, later_tiles_are_longer=True, processors=132))
    np.testing.assert_array_equal(head[:700] // 2, np.repeat([0, 1, 2, 3], [200, 200, 200, 100]))
    np.testing.assert_array_equal(head[700:], np.tile([7, 8, 9], 100))


@pytest.mark.parametrize("tiles, heads", [(128, 16), (1024, 3), (7, 5), (33, 64), (1, 1)])
@pytest.mark.parametrize("persistent", (True, False))
def test_every_tile_of_traced_costs_is_scheduled_once(tiles, heads, persistent):
    scheduler = DynamicTileScheduler(tiles, heads, persistent, processors=132)
    costs = np.random.default_rng(0).integers(1, 100, (heads, tiles)).astype(np.int32)
    order = scheduler.order(jnp.asarray(costs))
    number = jnp.arange(scheduler.number, dtype=jnp.int32)
    place, head = map(np.asarray, jax.vmap(lambda n: scheduler.place(scheduler.tile_of(n, order)))(number))
    assert sorted(head * tiles + place) == list(range(tiles * heads))
    of_last = costs[head, place][-len(order) :]
    assert (of_last[:-1] >= of_last[1:]).all() and (np.diff(head[: -len(order)]) >= 0).all()
    if not persistent:
        assert scheduler.blocks == scheduler.number == tiles * heads
        assert scheduler.tile(jnp.int32(tiles * heads - 1), jnp.int32(0), order) == (place[-1], head[-1])


LENGTHS = {
    "even": [2048] * 8,
    "uneven": [32, 9248, 512, 2048, 1024, 3072, 256, 192],
    "one": [16384],
    "short": [256] * 32,
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("heads", [16, 32])
def test_thread_blocks_that_take_the_next_tile_end_together(lengths, heads):
    """Packed causal sequences, whose tiles see from one to seventy blocks of keys: within 2 %, or a tile."""
    cuts = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)[None]
    ranges = Visibility(sum(lengths), sum(lengths), None, 0, (cuts, cuts)).block_ranges(128, 128)
    costs = np.broadcast_to(ranges.end - ranges.begin, (heads, ranges.end.size))
    scheduler = DynamicTileScheduler(costs.shape[1], heads, True, processors=132)
    order = scheduler.order(jnp.asarray(costs))
    tile = jax.vmap(lambda n: scheduler.tile_of(n, order))(jnp.arange(scheduler.number, dtype=jnp.int32))
    free = [0.0] * scheduler.processors
    for cost in costs.reshape(-1)[np.asarray(tile)] + TILE_OVERHEAD:
        heapq.heapreplace(free, free[0] + cost)
    assert max(free) <= max(1.02 * np.mean(free), np.mean(free) + costs.min())


@pytest.mark.parametrize("causal", [True, False])
def test_a_forward_of_wide_heads_begins_with_its_longest_tiles(causal):
    """256 features leave no shared memory for a persistent kernel; the last queries see most keys."""
    q, k, v = (jax.ShapeDtypeStruct((2, 4096, heads, 256), jnp.bfloat16) for heads in (16, 8, 8))
    plan = Plan(problem_of(Operands(q, k, v), FlashAttentionSpec(causal=causal)), 128, 64, 2, processors=132)
    assert isinstance(plan.scheduler, SingleTileScheduler) and plan.scheduler.processors == 132
    place, *_ = work(plan.scheduler)
    assert place[0] == (plan.q_tiles - 1 if causal else 0)
