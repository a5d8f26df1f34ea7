"""`mask_info` in the call form of ejkernel 0.0.78: empty ones, wrong ones, and arrays whose lengths do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel import modules
from ejkernel.types import MaskInfo
from tests.modules.release import B, K, S, close, formula, qkv, random


@pytest.mark.parametrize("info", (MaskInfo(), MaskInfo(sliding_window_baked_in=True)), ids=("plain", "with a flag"))
def test_an_empty_mask_info_hides_nothing(info):
    q, k, v = qkv(K)
    window = dict(sliding_window=1, causal=False, mask_info=info)
    near = np.abs(np.arange(S)[:, None] - np.arange(K)) <= (K if info.sliding_window_baked_in else 1)
    close(modules.flash_attention(q, k, v, **window), formula(q, k, v, near)[0])
    ends = jnp.array([3, 6]), jnp.array([5, 9])
    valid = [np.arange(n) < np.asarray(end)[:, None] for n, end in zip((S, K), ends, strict=True)]
    valid = (valid[0][:, :, None] & valid[1][:, None])[:, None]
    found = modules.scaled_dot_product_attention(q, k, v, None, *ends, **window)
    close(found, formula(q, k, v, near & valid)[0])
    turned = [x.swapaxes(1, 2) for x in (q, k, v)]
    pairs = np.arange(S * K).reshape(S, K) % 3 > 0
    mask = jnp.broadcast_to(pairs, (B, S, K))
    found = modules.blocksparse_attention(*turned, attention_mask=mask, **window)
    close(found.swapaxes(1, 2), formula(q, k, v, near & pairs)[0])
    found = modules.blocksparse_attention(*turned, chunk_size=2, **window)
    chunks = (np.arange(S)[:, None] // 2 == np.arange(K) // 2) & (np.arange(K) <= np.arange(S)[:, None])
    close(found.swapaxes(1, 2), formula(q, k, v, near & chunks)[0])


@pytest.mark.parametrize("operation", ("flash_attention", "attention", "scaled_dot_product_attention"))
@pytest.mark.parametrize("causal", (False, True))
def test_values_and_columns_of_a_bias_are_as_many_as_keys(operation, causal):
    """Also where keys are cut off, which after six causal queries no query sees."""
    (q, k, v), call = qkv(K), getattr(modules, operation)
    with pytest.raises(ValueError, match="v has length 7 but k has 9; they must be equal"):
        call(q, k, v[:, :7], mask_info=None, causal=causal)
    with pytest.raises(ValueError, match="bias has 8 columns; it must have 1 or 9, as k"):
        call(q, k, v, random(1, 4, S, K - 1), mask_info=None, causal=causal)


@pytest.mark.parametrize(
    ("info", "message"),
    (
        (np.ones((B, S, K), bool), "mask_info is array.*; it must be a MaskInfo or None"),
        (MaskInfo.from_segments(np.zeros((3, S)), np.zeros((3, K))), r"q_segment_ids must be \(2, 6\)"),
        (MaskInfo(_q_segment_ids=jnp.zeros((B, S), int)), "segment ids of queries or keys alone"),
    ),
    ids=("array", "batch", "queries alone"),
)
def test_a_mask_info_that_does_not_fit(info, message):
    q, k, v = qkv(K)
    with pytest.raises((TypeError, ValueError), match=message):
        modules.flash_attention(q, k, v, mask_info=info)


def test_ring_attention_over_explicit_axes():
    """Arrays are brought to the shardings of in_specs, as those of other operations are."""
    mesh = jax.make_mesh((2, 2), ("tp", "sp"), devices=jax.devices()[:4], axis_types=(AxisType.Explicit,) * 2)
    q, k, v = qkv()
    ids, spec = np.array([[0, 0, 1, 1, 1, -1], [-1, 0, 0, 0, 0, 0]]), P(None, "sp", "tp")
    call = lambda q, k, v: modules.ring_attention(
        *(q, k, v, None, None),
        **dict(axis_name="sp", mask_info=MaskInfo.from_segments(ids), causal=True, mesh=mesh),
        **dict(in_specs=(spec, spec, spec, None, None), out_specs=spec),
    )
    visible = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None] & np.tri(S, dtype=bool)
    for of in (call, jax.jit(call)):
        close(of(q, k, v), formula(q, k, v, visible[:, None])[0])


def test_flat_block_tables_have_as_many_entries_for_each_sequence():
    q, k, v = random(5, 4, 8), random(5, 2, 8), random(5, 2, 8)
    arrays = random(6, 4, 4, 8), jnp.array([3, 1, 1]), jnp.arange(8), jnp.array([0, 3, 4, 5]), jnp.array([0, 0, 3])
    with pytest.raises(ValueError, match="block_tables has 8 entries; they must be as many for each of 3 sequences"):
        modules.ragged_page_attention_v3(q, k, v, *arrays)
