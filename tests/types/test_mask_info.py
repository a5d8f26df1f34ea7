"""MaskInfo: every constructor with everything that can be applied to it matches a formula of (b, i, j)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel.types import MaskInfo
from ejkernel.types.segment_masks import mask_to_segment_ids, segment_ids_to_mask, segment_ids_to_qkv_masks

B, S, K = 2, 7, 9
Q_IDS = np.array([[0, 0, 1, 1, -1, -1, 2], [-1, 0, 0, 0, 0, 0, 0]])
KV_IDS = np.array([[0, 0, 0, 1, 1, -1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, -1, -1]])
MASK = np.random.default_rng(0).random((B, 3, S, K)) < 0.6
TYPES = np.random.default_rng(1).integers(0, 3, (B, K))
LENGTHS = np.array([5, 7])


def of_ids(q, kv):
    return lambda b, h, i, j: q[b, i] == kv[b, j] and q[b, i] >= 0


# The constructors: the MaskInfo, its (Q, K), and the formula of visible pairs.
MADE = {
    "segments": (lambda: MaskInfo.from_segments(Q_IDS), (S, S), of_ids(Q_IDS, Q_IDS)),
    "cross segments": (lambda: MaskInfo.from_segments(Q_IDS, KV_IDS), (S, K), of_ids(Q_IDS, KV_IDS)),
    "padding": (
        lambda: MaskInfo.from_attention_mask(Q_IDS >= 0),
        (S, S),
        lambda b, h, i, j: Q_IDS[b, i] >= 0 and Q_IDS[b, j] >= 0,
    ),
    "hidden padding": (
        lambda: MaskInfo.from_attention_mask(Q_IDS < 0, mask_is_valid=False),
        (S, S),
        lambda b, h, i, j: Q_IDS[b, i] >= 0 and Q_IDS[b, j] >= 0,
    ),
    "pairs": (lambda: MaskInfo.from_attention_mask(MASK[:, 0]), (S, K), lambda b, h, i, j: MASK[b, 0, i, j]),
    "pairs of heads": (lambda: MaskInfo.from_attention_mask(MASK), (S, K), lambda b, h, i, j: MASK[b, h, i, j]),
    "raw": (lambda: MaskInfo(_attention_mask=jnp.asarray(MASK)), (S, K), lambda b, h, i, j: MASK[b, h, i, j]),
    "ends": (
        lambda: MaskInfo.from_cu_seqlens(np.array([1, 5, 0, 7]), max_q_len=S),
        (S, S),
        lambda b, h, i, j: all([1, 0][b] <= x < [5, 7][b] for x in (i, j)),
    ),
    "tokens": (lambda: MaskInfo.dynamic_init(input_ids=jnp.ones((B, S))), (S, S), lambda b, h, i, j: True),
}

# What is applied: the change, and its formula from the previous formula f and the place in the whole.
APPLIED = {
    "nothing": (lambda x: x, lambda f, b, h, i, j: f(b, h, i, j)),
    "causal": (lambda x: x.apply_causal(), lambda f, b, h, i, j: f(b, h, i, j) and j <= i),
    "causal of an offset": (lambda x: x.apply_causal(1), lambda f, b, h, i, j: f(b, h, i, j) and j <= i + 1),
    "causal of offsets": (
        lambda x: x.apply_causal(jnp.array([1, -1])),
        lambda f, b, h, i, j: f(b, h, i, j) and j <= i + [1, -1][b],
    ),
    "window": (lambda x: x.apply_sliding_window(2), lambda f, b, h, i, j: f(b, h, i, j) and abs(i - j) <= 2),
    "causal window": (
        lambda x: x.apply_causal().apply_sliding_window((1, 2), offset=1),
        lambda f, b, h, i, j: f(b, h, i, j) and i <= j <= i,
    ),
    "window of offsets": (
        lambda x: x.apply_sliding_window(1, offset=np.array([0, 2])),
        lambda f, b, h, i, j: f(b, h, i, j) and abs(i + [0, 2][b] - j) <= 1,
    ),
    "traced window": (
        lambda x: jax.jit(lambda x, w: x.apply_sliding_window(w))(x, 2),
        lambda f, b, h, i, j: f(b, h, i, j) and abs(i - j) <= 2,
    ),
    "chunks": (lambda x: x.apply_chunked(3), lambda f, b, h, i, j: f(b, h, i, j) and i // 3 == j // 3 and j <= i),
    "traced chunks": (
        lambda x: jax.jit(lambda x, c: x.apply_chunked(c, offset=1))(x, 2),
        lambda f, b, h, i, j: f(b, h, i, j) and i // 2 == j // 2 and j <= i + 1,
    ),
    "types besides": (
        lambda x: x.apply_causal().apply_token_type_ids((TYPES[:, :S], TYPES[:, : x.kv_len])),
        lambda f, b, h, i, j: (f(b, h, i, j) and j <= i) or (TYPES[b, i] == TYPES[b, j] and TYPES[b, i] != 0),
    ),
    "types within": (
        lambda x: x.apply_token_type_ids((TYPES[:, :S], TYPES[:, : x.kv_len]), combine="intersect", zero_policy="none"),
        lambda f, b, h, i, j: f(b, h, i, j) and TYPES[b, i] == TYPES[b, j],
    ),
    "types alone": (
        lambda x: x.apply_token_type_ids((TYPES[:, :S], TYPES[:, : x.kv_len]), combine="replace", zero_policy="both"),
        lambda f, b, h, i, j: TYPES[b, i] == TYPES[b, j] and TYPES[b, i] != 0,
    ),
    "chunks, then a causal window": (
        lambda x: x.apply_chunked(4).apply_causal().apply_sliding_window(1),
        lambda f, b, h, i, j: f(b, h, i, j) and i // 4 == j // 4 and i - 1 <= j <= i,
    ),
}


def table(formula, heads, rows, columns):
    """The mask of all pairs by the formula, for given rows and columns [B, n]."""
    return np.array(
        [[[[bool(formula(b, h, i, j)) for j in columns[b]] for i in rows[b]] for h in range(heads)] for b in range(B)]
    )


def whole(length):
    return np.broadcast_to(np.arange(length), (B, length))


@pytest.mark.parametrize("change", APPLIED)
@pytest.mark.parametrize("made", MADE)
def test_the_mask_is_that_of_the_formula(made, change):
    make, (rows, columns), base = MADE[made]
    apply, formula = APPLIED[change]
    found = apply(make())
    heads = found.attention_mask.shape[1]
    expected = table(lambda *at: formula(base, *at), heads, whole(rows), whole(columns))
    np.testing.assert_array_equal(found.attention_mask, expected)
    np.testing.assert_array_equal(found.create_bias(), np.where(expected, 0, np.finfo(np.float32).min))
    if made == "segments":  # the others are the same functions of other arrays
        by_jit = jax.jit(lambda x: apply(x).get_or_compute_attention_mask(jnp.float32))(make())
        np.testing.assert_array_equal(by_jit, expected)


@pytest.mark.parametrize("made", MADE)
def test_the_parts_of_a_step_are_those_of_the_whole(made):
    make, (_, keys), base = MADE[made]
    causal = lambda b, h, i, j: base(b, h, i, j) and j <= i
    heads = make().attention_mask.shape[1]
    last = np.minimum(LENGTHS[:, None] + np.arange(-2, 0), S - 1)

    found = make().apply_causal().apply_kv_lengths(LENGTHS, q_len=2, end_index=LENGTHS)
    expected = table(lambda b, h, i, j: causal(b, h, i, j) and j < LENGTHS[b], heads, last, whole(keys))
    np.testing.assert_array_equal(found.attention_mask, expected)

    found = make().apply_kv_lengths(LENGTHS, q_len=1, sliding_window=4)
    kept = LENGTHS[:, None] + np.arange(-4, 0)
    expected = table(lambda b, h, i, j: base(b, h, i, j) and j < LENGTHS[b], heads, last[:, 1:], kept)
    np.testing.assert_array_equal(found.attention_mask, expected)

    found = make().apply_causal().apply_sliding_window(2, mode="decode", index=np.array([3, 6]))
    start = np.clip(np.array([3, 6]) - 2, 0, keys - 5)
    row = np.array([[3], [6]])
    window = lambda b, h, i, j: causal(b, h, i, j) and abs(i - j) <= 2
    np.testing.assert_array_equal(found.attention_mask, table(window, heads, row, start[:, None] + np.arange(5)))

    found = make().apply_sliding_window((2, 1), mode="prefill")
    window = lambda b, h, i, j: base(b, h, i, j) and i - 2 <= j <= i + 1
    expected = table(window, heads, whole(make().q_len), whole(keys)[:, keys - 4 :])
    np.testing.assert_array_equal(found.attention_mask, expected)


@pytest.mark.parametrize("bound", [2**31 - 1, np.int32(2**31 - 1), 2**31, 2**63 - 1, None], ids=repr)
def test_bounds_beyond_every_length_hide_nothing(bound):
    """Models without a window have such numbers in its place, which do not fit in 32 bits with an index added."""
    made, causal = MaskInfo.from_segments(Q_IDS), np.arange(S) <= np.arange(S)[:, None]
    all_of_it = np.asarray(made.attention_mask)
    found = made.apply_sliding_window((bound, 0))
    np.testing.assert_array_equal(found.attention_mask, all_of_it & causal)
    for offset in (0, 1, jnp.array([1, -1])):
        found = made.apply_sliding_window((bound, bound), offset=offset)
        np.testing.assert_array_equal(found.attention_mask, all_of_it)
    row = made.apply_sliding_window((bound, 0), mode="decode", index=jnp.array([3, 6]))
    np.testing.assert_array_equal(row.attention_mask[:, 0, 0], (all_of_it & causal)[[0, 1], 0, [3, 6]])
    if bound is None:
        return
    for found in (made.apply_sliding_window(bound), made.apply_causal(bound)):
        np.testing.assert_array_equal(found.attention_mask, all_of_it)
    assert MaskInfo.create_chunked_attention_mask(S, S, offset=bound).all()
    if bound < 2**31:
        traced = jax.jit(lambda x, w: x.apply_sliding_window(w, offset=jnp.array([1, 0])).attention_mask)
        np.testing.assert_array_equal(traced(made, bound), all_of_it)


def test_kernels_get_ids_and_a_band_instead_of_a_mask():
    found = MaskInfo.from_segments(Q_IDS).apply_causal().apply_sliding_window((3, 5))
    assert found.visibility.mask is None and found.visibility.band == (-3, 0)
    assert len(jax.tree.leaves(found)) == 2
    shown = jax.make_jaxpr(lambda x: x.apply_causal().apply_sliding_window(2))(MaskInfo.from_attention_mask(Q_IDS >= 0))
    assert f"{S},{S}" not in str(shown)


def test_it_is_a_pytree_whose_flags_are_static():
    made = MaskInfo.from_segments(Q_IDS).apply_causal()
    again = jax.tree.unflatten(*jax.tree.flatten(made)[::-1])
    assert again.baked_in_masks == dict(causal=True, sliding_window=False, chunked=False, token_type_ids=False)
    np.testing.assert_array_equal(jax.jit(lambda x: x)(made).attention_mask, made.attention_mask)
    object.__setattr__(made, "of_a_caller", True)  # as EasyDeL marks one
    assert made.of_a_caller


def test_positions_begin_with_each_segment():
    found = MaskInfo.from_segments(np.array([[0, 0, -1, 0, 1, 0, 2, 2]]))
    assert found.q_position_ids.tolist() == [[0, 1, -1, 0, 0, 0, 0, 1]]
    assert found.q_attention_mask.tolist() == [[1, 1, 0, 1, 1, 1, 1, 1]]
    q, kv = found.replace(q_positions=jnp.arange(8)[None]).get_or_compute_positions()
    assert q.tolist() == [list(range(8))] and kv[0, 2] == 2**31 - 1


def test_a_window_of_a_step_keeps_the_attached_positions_of_its_rows_and_keys():
    at = 10 + jnp.arange(S)[None]
    made = MaskInfo.from_segments(Q_IDS, q_positions=at, kv_positions=at)
    decode = made.apply_sliding_window((2, 0), mode="decode", index=jnp.array([3, 6]))
    assert decode.q_positions.tolist() == [[13], [16]]
    assert decode.kv_positions.tolist() == [[11, 12, 13], [14, 15, 16]]
    prefill = made.apply_sliding_window(2, mode="prefill")
    assert prefill.q_positions.tolist() == [at[0].tolist()] * B and prefill.kv_positions.tolist() == [[15, 16]] * B


def test_replace_takes_a_mask_and_keeps_the_rest():
    given = jnp.asarray(MASK[:, :1])
    found = MaskInfo.from_segments(Q_IDS, KV_IDS).apply_causal().replace(attention_mask=given, kv_segment_ids=None)
    np.testing.assert_array_equal(found.attention_mask, given)
    np.testing.assert_array_equal(found.kv_segment_ids, KV_IDS)
    assert found.replace(sliding_window_baked_in=True).sliding_window_baked_in


def test_ids_of_a_mask_number_its_blocks():
    ids = np.array([[0, 0, 1, -1, 2]])
    q, kv = mask_to_segment_ids(segment_ids_to_mask(ids))
    np.testing.assert_array_equal(q, ids)
    np.testing.assert_array_equal(kv, ids)
    q, kv = mask_to_segment_ids(jnp.array([[1, 1, 0], [1, 1, 0], [0, 0, 0]]))
    assert (q.tolist(), kv.tolist()) == ([0, 0, -1], [0, 0, -1])
    assert mask_to_segment_ids(MASK, per_head=True)[0].shape == (B, 3, S)
    assert MaskInfo(_attention_mask=jnp.asarray(MASK)).materialize_segment_ids().kv_segment_ids.shape == (B, K)
    q_mask, kv_mask, mask = segment_ids_to_qkv_masks(Q_IDS, KV_IDS, jnp.float32)
    assert (q_mask.shape, kv_mask.shape, mask.shape, mask.dtype) == ((B, S), (B, K), (B, 1, S, K), jnp.float32)


def test_chunks_become_the_ids():
    found = MaskInfo.from_segments(Q_IDS).apply_chunked(3)
    assert found.q_segment_ids.tolist() == [[1, 1, 1, 2, -1, -1, 3], [-1, 1, 1, 2, 2, 2, 3]]


def test_lengths():
    found = MaskInfo.from_segments(Q_IDS[:1], KV_IDS[:1])
    assert (found.q_lens.tolist(), found.kv_lens.tolist()) == ([2, 2, 1], [3, 2, 3])
    assert bool(found.is_multi_sequence) and not found.is_self_attention()
    q, _ = found.get_or_compute_qkv_cu_seqlens(max_segments=4)
    assert q.tolist() == [0, 2, 4, 5, 5]
    ends = MaskInfo.from_cu_seqlens(np.array([1, 5, 0, 7]), max_q_len=S)
    assert (ends.cu_seqlens_q.tolist(), ends.q_lens.tolist()) == ([1, 5, 0, 7], [4, 7])


def test_ids_that_a_traced_program_has_as_constants_are_compared():
    same, other = MaskInfo.from_segments(Q_IDS), MaskInfo.from_segments(Q_IDS, Q_IDS + 1)
    assert jax.jit(lambda: (same.is_self_attention(), other.is_self_attention()))() == (True, False)


def test_shardings():
    mesh = jax.make_mesh((1, 1, 1, 1), ("dp", "fsdp", "tp", "sp"), devices=jax.devices()[:1])
    found = MaskInfo.from_attention_mask(MASK).get_shardings(True, mesh=mesh)
    assert found.attention_mask == P(("dp", "fsdp"), "tp", "sp", None)
    assert found.q_segment_ids == P(("dp", "fsdp"), "sp") and found.q_positions is None
    two = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2])
    odd = MaskInfo.from_segments(np.zeros((3, 4)), batch_axis_name="dp", qheads_axis_name=None)
    assert odd.get_shardings(mesh=two).q_segment_ids == P(None, None)
    with pytest.raises(ValueError, match="'tp' is no axis of the mesh"):
        MaskInfo.from_segments(np.zeros((2, 4)), batch_axis_name="dp").get_shardings(mesh=two)


def test_a_picture():
    text = MaskInfo.from_segments(np.array([[0, 0, -1]])).apply_causal().visualize(1, charset="ascii", return_str=True)
    assert [line.split("|")[1] for line in text.splitlines()[2:]] == ["##    ", "####  ", "      "]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MaskInfo().apply_causal(), "of an empty MaskInfo"),
        (lambda: MaskInfo().q_position_ids, "it is empty"),
        (lambda: MaskInfo.dynamic_init(), "is given no mask_info"),
        (lambda: MaskInfo.from_attention_mask(jnp.ones(4)), "has 1 axes"),
        (lambda: MaskInfo.from_segments(Q_IDS).apply_sliding_window(-1), "must not be negative"),
        (lambda: MaskInfo.from_segments(Q_IDS).apply_sliding_window((1, 2, 3)), "must be an int or a pair"),
        (lambda: MaskInfo.from_segments(Q_IDS).apply_sliding_window(None), "sliding_window is None; it must be an int"),
        (lambda: MaskInfo.from_segments(Q_IDS).apply_kv_lengths(LENGTHS, q_len=-1), "q_len is -1"),
        (
            lambda: MaskInfo.from_segments(Q_IDS).apply_kv_lengths(LENGTHS, q_len=1, sliding_window=-2),
            "sliding_window is -2",
        ),
        (lambda: MaskInfo.from_cu_seqlens(np.array([0, 3, 5]), max_q_len=S), "cu_seqlens_q has 3 entries"),
        (lambda: MaskInfo.from_segments(Q_IDS).apply_sliding_window(1, mode="decode"), "needs index"),
        (lambda: MaskInfo.from_segments(Q_IDS).apply_sliding_window(1, mode="train"), "must be default"),
        (lambda: MaskInfo.from_segments(Q_IDS).apply_chunked(0), "at least 1"),
        (lambda: MaskInfo.from_segments(Q_IDS).apply_kv_lengths(LENGTHS), "needs q_len"),
        (lambda: MaskInfo.from_segments(Q_IDS).apply_token_type_ids(TYPES), "tokens for"),
        (lambda: MaskInfo.from_segments(Q_IDS).apply_token_type_ids(Q_IDS, combine="and"), "combine is 'and'"),
    ],
)
def test_contradictory_arguments_are_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert MaskInfo().attention_mask is None and MaskInfo().shape == (None, None, None)


def test_random():
    mask = MaskInfo.from_random(2, 40, 50, sparsity=0.7).attention_mask
    assert mask.shape == (2, 1, 40, 50) and abs(mask.mean() - 0.3) < 0.03
