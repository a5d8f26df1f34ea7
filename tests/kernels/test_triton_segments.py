"""Blocks that share no segment are passed over: which they are, and that nothing in them is read."""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import KernelConfig
from tests.gpu.attention_cases import like

pytest.importorskip("triton")
from ejkernel.kernels._segments import spans
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.flash_attention import (
    flash_attention,
    flash_attention_bwd,
    flash_attention_jvp,
)

from . import interpreter

BLOCK = 16


def operands(ids) -> Operands:
    """One head; ids of queries and keys alike, each for a block of tokens."""
    ids = jnp.repeat(jnp.asarray([ids], jnp.int32), BLOCK, 1)
    q, k, v = (like(jnp.zeros((1, ids.shape[1], 1, 16)), seed) for seed in range(3))
    return Operands(q, k, v, q_segment_ids=ids, kv_segment_ids=ids)


def blocks(ids, **changed) -> list[tuple[int, ...]]:
    """(begin, end, begin of the whole ones, their end) of each block, in blocks."""
    found = spans(operands(ids)._replace(**changed), BLOCK, BLOCK)
    return [tuple(int(n) for n in row) for row in np.asarray(found[0]) // BLOCK]


def test_sorted_ids_leave_the_other_segments_out():
    assert blocks([0, 0, 0, 1, 2, 2]) == [(0, 3, 0, 3)] * 3 + [(3, 4, 3, 4)] + [(4, 6, 4, 6)] * 2


def test_padding_sees_nothing():
    assert [row[:2] for row in blocks([4, 4, -1])] == [(0, 2), (0, 2), (3, 0)]


def test_ids_in_any_order_keep_all_that_is_seen():
    """Of the blocks that are whole, those up to the first that is not."""
    assert blocks([7, 3, 7, 7]) == [(0, 4, 0, 1), (1, 2, 1, 2), (0, 4, 0, 1), (0, 4, 0, 1)]


def test_a_block_of_two_segments_sees_both_and_is_never_whole():
    mixed = operands([0, 0, 1]).q_segment_ids.at[0, BLOCK + 5 : 2 * BLOCK].set(1)
    found = blocks([0, 0, 1], q_segment_ids=mixed, kv_segment_ids=mixed)
    assert [row[:2] for row in found] == [(0, 2), (0, 3), (1, 3)]
    assert found[1][2:] == (3, 3)


@pytest.mark.parametrize("ids", [[0, 0, 1, 1], [5, 5, 2, 2], [3, 3, 9, -1]], ids=str)
def test_nan_in_blocks_that_are_passed_over(ids, monkeypatch):
    """NaN in every operand of the other segments changes no bit of what belongs to the first."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    spec, config = FlashAttentionSpec(causal=True), KernelConfig(block_q=BLOCK, block_k=BLOCK)

    def everything(x: Operands, bad: float):
        mine = (x.q_segment_ids == ids[0])[:, :, None, None]
        spoil = lambda a: jnp.where(mine, a, bad)
        x = x._replace(q=spoil(x.q), k=spoil(x.k), v=spoil(x.v))
        outputs = flash_attention(*x, spec=spec, config=config)
        moving = Operands(*(spoil(like(a, 5)) for a in x[:3]))
        tangents = flash_attention_jvp(x, outputs, moving, spec=spec, config=config)
        cotangents = like(outputs, 6)
        cotangents = cotangents._replace(o=spoil(cotangents.o))
        gradients = flash_attention_bwd(x, outputs, cotangents, wrt=("q", "k", "v"), spec=spec, config=config)
        return [a[:, : 2 * BLOCK] for a in (outputs.o, tangents.o, *gradients)]

    for a, b in zip(everything(operands(ids), 0.5), everything(operands(ids), jnp.nan), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)
