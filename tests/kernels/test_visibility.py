"""Visibility as the kernels of all platforms get it, compared with the formula for every pair."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._visibility import Visibility, visibility_of, zero_fully_masked
from ejkernel.primitives.flash_attention import FlashAttentionSpec
from ejkernel.types import band
from tests.gpu.attention_cases import CASES, CAUSAL, Case
from tests.gpu.oracle import visible

LENGTH, BLOCK_Q, BLOCK_K = 70, 32, 16
IN_NO_ORDER = "segments in no order"
MORE = [
    Case(IN_NO_ORDER, segments=True, S=0.7),
    Case("packed, causal, from later on", packed=True, first=0.1, S=1.2, spec=CAUSAL),
    Case("packed, from later on, mask", packed=True, first=0.1, mask="bst"),
    Case("window behind the diagonal", spec=FlashAttentionSpec(window=(None, -20))),
    Case("window, fewer keys", K=0.4, spec=FlashAttentionSpec(causal=True, window=(9, 0))),
]
KEY_MASKS = [replace(case, name=f"{case.name}, mask of keys", mask="bt") for case in (CASES[0], *MORE[:2], MORE[-1])]


def distinct(cases) -> list[Case]:
    """One case of each kind with a different visibility."""
    of = lambda x: (
        x.S,
        x.K,
        x.spec.causal,
        x.spec.window,
        x.mask,
        x.segments,
        x.packed,
        x.first,
        x.name.startswith(IN_NO_ORDER),
    )
    return list({of(case): case for case in reversed(cases) if round(case.K * LENGTH)}.values())


CALLS = distinct([*CASES, *MORE, *KEY_MASKS])
SIDES = pytest.mark.parametrize("transposed", [False, True], ids=["queries", "keys"])


def call(case: Case, transposed: bool = False) -> tuple[Visibility, np.ndarray]:
    """The visibility of a call: as kernels get it, and bool [B, H?, S, K]."""
    x, spec = case.make(LENGTH, jnp.float32)
    if case.name.startswith(IN_NO_ORDER):
        rng = np.random.default_rng(5)
        x = x._replace(q_segment_ids=rng.permuted(x.q_segment_ids, axis=1), kv_segment_ids=x.kv_segment_ids[:, ::-1])
    found, ok = visibility_of(x, spec), np.asarray(visible(x, spec))
    return (found.transposed(), ok.swapaxes(2, 3)) if transposed else (found, ok)


def of(case: Case):
    return case.name


@SIDES
@pytest.mark.parametrize("case", CALLS, ids=of)
def test_pairs(case, transposed):
    visibility, ok = call(case, transposed)
    np.testing.assert_array_equal(*np.broadcast_arrays(visibility.pairs(), ok))


@SIDES
@pytest.mark.parametrize("case", CALLS, ids=of)
def test_fully_masked(case, transposed):
    """It is never claimed wrongly that no token is fully masked."""
    visibility, ok = call(case, transposed)
    masked = ~ok.any(3)
    np.testing.assert_array_equal(*np.broadcast_arrays(visibility.fully_masked(), masked))
    if visibility.mask is None and visibility.segment_ids is None:
        assert visibility.masks_queries or not masked.any()


@SIDES
@pytest.mark.parametrize("case", CALLS, ids=of)
def test_intervals_contain_the_visible_keys(case, transposed):
    """And exactly those if only the band and the sequences hide keys."""
    visibility, ok = call(case, transposed)
    first, stop = (np.asarray(x)[:, None, :, None] for x in visibility.intervals())
    key = np.arange(ok.shape[3])
    inside = (first <= key) & (key < stop)
    assert (first >= 0).all() and (first <= stop).all() and (stop <= ok.shape[3]).all()
    assert (inside | ~ok).all()
    if visibility.mask is None and visibility.segment_ids is None:
        np.testing.assert_array_equal(*np.broadcast_arrays(inside, ok))


@pytest.mark.parametrize("case", [case for case in CALLS if not (case.packed or case.segments or case.mask)], ids=of)
def test_constants_are_computed_alike(case):
    visibility, _ = call(case)
    for constant, traced in zip(visibility.intervals(np), visibility.intervals(), strict=True):
        assert isinstance(constant, np.ndarray)
        np.testing.assert_array_equal(constant, traced)
    for constant, traced in zip(
        visibility.blocks(BLOCK_Q, BLOCK_K, np), visibility.blocks(BLOCK_Q, BLOCK_K), strict=True
    ):
        assert isinstance(constant, np.ndarray)
        np.testing.assert_array_equal(constant, traced)


@SIDES
@pytest.mark.parametrize("case", [case for case in CALLS if case.mask is None], ids=of)
def test_block_ranges(case, transposed):
    """A block range has all keys that its queries see, and the full blocks are visible as a whole."""
    visibility, ok = call(case, transposed)
    ranges = visibility.block_ranges(BLOCK_Q, BLOCK_K)
    assert all(isinstance(x, np.ndarray) for x in ranges) is not (case.packed or case.segments)
    blocks = -(-ok.shape[3] // BLOCK_K)
    for batch, tile in np.ndindex(len(ok), -(-ok.shape[2] // BLOCK_Q)):
        at = lambda ranges, batch=batch, tile=tile: (int(x[batch % len(x), tile]) for x in ranges)
        rows = ok[batch, :, tile * BLOCK_Q : (tile + 1) * BLOCK_Q]
        begin, end, *_ = at(ranges)
        assert not rows[..., : begin * BLOCK_K].any()
        assert not rows[..., end * BLOCK_K :].any()
        begin, end, full_begin, full_end = at(ranges.at_least_one(blocks))
        assert 0 <= begin <= full_begin <= full_end <= end <= blocks
        assert begin < end
        assert rows[..., full_begin * BLOCK_K : full_end * BLOCK_K].all()


@SIDES
@pytest.mark.parametrize("case", CALLS, ids=of)
def test_blocks(case, transposed):
    """Blocks not in "some" are fully masked, those in "full" fully visible; in a band the converse holds too."""
    visibility, ok = call(case, transposed)
    some, full = (np.broadcast_to(x, (len(ok), *x.shape[1:])) for x in visibility.blocks(BLOCK_Q, BLOCK_K))
    exact = not (case.packed or case.segments or case.mask)
    for batch, i, j in np.ndindex(some.shape):
        block = ok[batch, :, i * BLOCK_Q : (i + 1) * BLOCK_Q, j * BLOCK_K : (j + 1) * BLOCK_K]
        assert some[batch, i, j] or not block.any()
        assert not full[batch, i, j] or block.all()
        if exact:
            assert some[batch, i, j] == block.any()
            assert full[batch, i, j] == (block.all() and block.shape[2] == BLOCK_K)


def test_sequences_of_whole_blocks_see_nothing_of_each_other():
    x, spec = Case("packed", packed=True, B=1).make(4 * BLOCK_Q, jnp.float32)
    cuts = jnp.asarray([[0, BLOCK_Q, 3 * BLOCK_Q, 4 * BLOCK_Q]], jnp.int32)
    ranges = visibility_of(x._replace(cu_seqlens_q=cuts, cu_seqlens_k=cuts), spec).block_ranges(BLOCK_Q, BLOCK_Q)
    assert np.stack(ranges, -1)[0].tolist() == [[0, 1, 0, 1], [1, 3, 1, 3], [1, 3, 1, 3], [3, 4, 3, 4]]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([0, 0, 0, 1, 2, 2], [(0, 3, 0, 3)] * 3 + [(3, 4, 3, 4)] + [(4, 6, 4, 6)] * 2),
        ([4, 4, -1], [(0, 2, 0, 2), (0, 2, 0, 2), (3, 0, 3, 3)]),
        ([7, 3, 7, 7], [(0, 4, 0, 1), (1, 2, 1, 2), (0, 4, 0, 1), (0, 4, 0, 1)]),
    ],
    ids=["sorted", "padding", "any order"],
)
def test_segment_block_ranges(ids, expected):
    """With ids in any order a block range has all visible keys; full blocks are those up to the first that is not."""
    ids = jnp.repeat(jnp.asarray([ids], jnp.int32), BLOCK_K, 1)
    visibility = Visibility(*ids.shape[1:] * 2, None, None, segment_ids=(ids, ids))
    ranges = visibility.segment_block_ranges(BLOCK_K, BLOCK_K)
    assert list(map(tuple, np.stack(ranges, -1)[0].tolist())) == expected


def test_a_block_of_two_segments_sees_both_and_is_never_full():
    ids = jnp.repeat(jnp.asarray([[0, 0, 1]], jnp.int32), BLOCK_K, 1).at[0, BLOCK_K + 5 : 2 * BLOCK_K].set(1)
    ranges = Visibility(*ids.shape[1:] * 2, None, None, segment_ids=(ids, ids)).segment_block_ranges(BLOCK_K, BLOCK_K)
    begin, end, full_begin, full_end = (x[0].tolist() for x in ranges)
    assert list(zip(begin, end, strict=True)) == [(0, 2), (0, 3), (1, 3)]
    assert full_begin[1] == full_end[1]


@SIDES
@pytest.mark.parametrize("case", CALLS, ids=of)
def test_zeros_where_a_token_is_fully_masked(case, transposed):
    """With heads that share a key, one that sees it is enough."""
    visibility, ok = call(case, transposed)
    heads = case.G if transposed else case.H
    ok = np.broadcast_to(ok, (case.B, case.H, *ok.shape[2:])).any(3)
    of_heads = ok.reshape(case.B, heads, -1, ok.shape[2]).any(2)
    nan = jnp.full((case.B, ok.shape[2], heads, 3), jnp.nan)
    (zeroed,) = zero_fully_masked(visibility, nan)
    np.testing.assert_array_equal(np.asarray(zeroed) != 0, np.repeat(of_heads.swapaxes(1, 2)[..., None], 3, -1))


@pytest.mark.parametrize(
    ("causal", "window", "expected"),
    [
        (False, (None, None), (None, None)),
        (True, (None, None), (None, 0)),
        (True, (5, 3), (5, 0)),
        (True, (5, -2), (5, -2)),
        (False, (None, 3), (None, 3)),
    ],
)
def test_causality_ends_the_window_at_the_diagonal(causal, window, expected):
    assert band(causal, window) == expected
