"""Layouts of ring attention, the work of a hop, and the choice of a strategy: plain numbers."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import lax
from ejkernel.callib import Ceilings
from ejkernel.modules.operations._ring_layout import LAYOUTS, hops, parts_of
from ejkernel.modules.operations._ring_strategy import Problem, bytes_sent, choose, refusal, seconds

each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def of_device(length, size, layout, device):
    """The positions of a device's tokens, from the order of the whole sequence."""
    return lax.ring_order(length * size, size, layout)[0].reshape(size, length)[device]


def seen_in(part):
    """The visible pairs of a part, as flash_attention defines them."""
    queries, keys = part.q_end - part.q_begin, part.k_end - part.k_begin
    distance = np.arange(keys)[None] - (np.arange(queries)[:, None] + keys - queries)
    seen = np.ones((queries, keys), bool)
    seen &= True if part.left is None else distance >= -part.left
    return seen & (True if part.right is None else distance <= part.right)


@each_layout
@pytest.mark.parametrize("size", (1, 2, 3, 4, 5))
def test_the_parts_cover_every_visible_pair_once(layout, size):
    """For all bounds and pairs of devices, equal lengths or not; no part has negative bounds or no visible pair."""
    bounds = itertools.product((None, 0, 1, 3, 5, 9, 100), (None, 0, 1, 2, 7, 100))
    for (left, right), (queries, keys) in itertools.product(bounds, ((4, 4), (2, 6), (6, 2), (8, 8))):
        for d, source in itertools.product(range(size), range(size)):
            i = of_device(queries, size, layout, d)[:, None] + size * (keys - queries)
            distance = of_device(keys, size, layout, source)[None] - i
            wanted = np.ones((queries, keys), int)
            wanted &= 1 if left is None else distance >= -left
            wanted &= 1 if right is None else distance <= right
            found = np.zeros_like(wanted)
            for part in parts_of(queries, keys, size, layout, (left, right), d, source):
                assert min(part.left or 0, part.right or 0) >= 0 and seen_in(part).any()
                found[part.q_begin : part.q_end, part.k_begin : part.k_end] += seen_in(part)
            np.testing.assert_array_equal(found, wanted)


@each_layout
def test_the_order_and_its_inverse(layout):
    order, inverse = lax.ring_order(24, 3, layout)
    np.testing.assert_array_equal(np.sort(order), np.arange(24))
    np.testing.assert_array_equal(order[inverse], np.arange(24))
    first = dict(contiguous=range(8), striped=range(0, 24, 3), zigzag=(0, 1, 2, 3, 20, 21, 22, 23))
    np.testing.assert_array_equal(order[:8], list(first[layout]))
    np.testing.assert_array_equal(lax.ring_order(5, 1, layout)[0], np.arange(5))


@pytest.mark.parametrize(
    ("message", "arguments"),
    {
        "length 10 is no multiple of 4": (10, 4),
        "a shard has 3 tokens; zigzag needs an even number": (12, 4),
        "layout is 'spiral'; it must be one of": (16, 4, "spiral"),
        "size is 0; it must be at least 1": (16, 0),
        "length is -1; it must be at least 0": (-1, 4),
    }.items(),
)
def test_impossible_orders_are_errors(message, arguments):
    with pytest.raises(ValueError, match=f"ring_order: {message}"):
        lax.ring_order(*arguments)
    with pytest.raises(TypeError, match="ring_order: size must be an int, not float"):
        lax.ring_order(16, 4.0)


@pytest.mark.parametrize("layout", ("striped", "zigzag"))
@pytest.mark.parametrize("size", (2, 3, 4))
def test_a_causal_ring_is_balanced(layout, size):
    """In every hop all devices see as many pairs, up to a diagonal."""
    length = 16
    for _, of_devices in hops(length, length, size, layout, (None, 0)):
        pairs = [sum(int(seen_in(part).sum()) for part in parts) for parts in of_devices]
        assert max(pairs) - min(pairs) <= length


def test_hops_that_see_nothing_are_left_out():
    found = lambda layout, band: [hop for hop, _ in hops(8, 8, 6, layout, band)]
    assert found("contiguous", (3, 0)) == [0, 1]
    assert found("contiguous", (3, 3)) == [0, 1, 5]
    assert found("contiguous", (9, 0)) == [0, 1, 2]
    assert found("striped", (2, 0)) == [0, 1, 2]
    assert found("zigzag", (None, 0)) == list(range(6))


# --- The strategy -----------------------------------------------------------------------------------------------------


def problem(size=4, layout="zigzag", band=(None, 0), length=4096, heads=(32, 8), **others):
    q, k = ((length, h, 128) for h in heads)
    return Problem(size, layout, band, q, k, 128, jnp.bfloat16, **others)


def test_long_shards_go_round():
    assert choose(problem(length=8192))[0] == "ring"
    assert choose(problem(length=8192, heads=(7, 7)))[0] == "ring"


def test_calls_of_less_than_4096_keys_hide_no_sends():
    """A shard of 4096 tokens in zigzag has calls of 2048 keys."""
    of, long = problem(), problem(layout="contiguous")
    hop = 4 * 32 * 128 * 16384 * 16384 / 2 / 4 / 4 / 680e12
    sent = 2 * 99e-6 + 2 * 4096 * 8 * 128 * 2 / 365e9
    assert seconds(of)["ring"] == pytest.approx(hop + 3 * (hop + sent), rel=1e-3)
    assert seconds(long)["ring"] == pytest.approx(hop + 3 * max(hop, sent), rel=1e-3)
    assert choose(of)[0] == "all_gather" and choose(long)[0] == "ring"


def test_short_shards_choose_fewer_or_smaller_collectives():
    """Ulysses also sends q and o, in separate collectives, but only a part of each array."""
    assert choose(problem(length=128, heads=(8, 8)))[0] == "all_gather"
    assert choose(problem(length=128, heads=(32, 8)))[0] == "all_gather"
    assert choose(problem(length=256, heads=(32, 32), size=8, batch=8))[0] == "ulysses"
    assert choose(problem(length=128, heads=(6, 2), layout="striped"))[0] == "ring"
    sent = bytes_sent(problem(length=128, heads=(8, 8)))
    assert sent["ulysses"] < sent["all_gather"] == sent["ring"] == 3 * 128 * 8 * 256 * 2


@pytest.mark.parametrize(("tokens", "devices"), [*itertools.product((16384, 65536), (2, 4, 8))])
def test_the_points_that_are_predicted(tokens, devices):
    """Two causal sequences, 32/8 heads of 128 in bfloat16: 16k over 4 and 8 devices has calls of less than 4096 keys.

    The table of docs/long-context.md has the same points, with the time of merging added.
    """
    of = problem(size=devices, length=tokens // devices, batch=2)
    chosen, reason = choose(of)
    times = seconds(of)
    short = tokens // devices // 2 < 4096
    assert chosen == ("all_gather" if short else "ring") == min(times, key=times.get)
    assert f"ring {times['ring'] * 1e3:.2f} ms, all_gather {times['all_gather'] * 1e3:.2f} ms" in reason
    work = 4 * 2 * 32 * 128 * tokens * tokens / 2 / devices / 680e12
    sent = 2 * 2 * tokens // devices * 8 * 128 * 2 / 365e9
    both = sum if short else max
    hop = both((work / devices, 2 * 99e-6 + sent))
    assert times["ring"] == pytest.approx(work / devices + (devices - 1) * hop, rel=1e-3)
    assert times["all_gather"] == pytest.approx(work + 2 * 99e-6 + (devices - 1) * sent, rel=1e-3)


def test_a_short_window_goes_round():
    assert choose(problem(length=128, size=8, layout="contiguous", band=(127, 0)))[0] == "ring"


def test_a_ring_of_several_axes_may_be_shorter():
    """15 hops are mostly latency, and 8 key/value heads too few for 16 devices; 8 of these leave a ring of one hop."""
    of = problem(length=2048, size=16, heads=(32, 8), axes=2, within=8)
    assert choose(of)[0] == "usp"
    one_axis = problem(length=2048, size=16, heads=(32, 8))
    assert refusal("usp", one_axis) and choose(one_axis)[0] == "all_gather"
    exchange = bytes_sent(of)["usp"]
    assert exchange == bytes_sent(problem(length=2048, size=8, heads=(32, 8)))["ulysses"]
    ring = seconds(problem(length=8 * 2048, size=2, heads=(4, 1)))["ring"]
    assert seconds(of)["usp"] == pytest.approx(ring + 4 * 99e-6 + exchange / 365e9)
    for changed, reason in (
        (dict(heads=(32, 4)), "usp splits heads, and 32 query and 4 key/value heads are no multiples of 8 devices"),
        (dict(layout="striped"), "usp has no causal mask"),
        (dict(has_rows=True), "usp would need the bias or mask of all rows"),
    ):
        assert reason in refusal("usp", problem(**dict(size=16, axes=2, within=8) | changed))


def test_the_measured_throughput_decides():
    """On a device with slow products, hops of fewer heads already hide the communication."""
    of = problem(length=8192, heads=(4, 4))
    slow = Ceilings("slow", copy=4e12, matmul={"bfloat16": 1e12, "float32": 1e12}, jax="")
    assert choose(of)[0] == "all_gather" and choose(of, slow)[0] == "ring"


def test_every_refusal_names_a_way():
    for strategy, of in (
        ("ulysses", problem(heads=(6, 2))),
        ("ulysses", problem(has_rows=True)),
        ("all_gather", problem(layout="striped")),
    ):
        assert "use ring" in refusal(strategy, of)
