"""Blocks that share no segment are skipped: nothing in them is read."""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import KernelConfig
from tests.gpu.attention_cases import like

pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.flash_attention import (
    flash_attention,
    flash_attention_bwd,
    flash_attention_jvp,
)
from ejkernel.kernels._triton.flash_attention.problem import segment_ranges_of

from . import interpreter

BLOCK = 16


def operands(ids) -> Operands:
    """One head; ids of queries and keys alike, each for a block of tokens."""
    ids = jnp.repeat(jnp.asarray([ids], jnp.int32), BLOCK, 1)
    q, k, v = (like(jnp.zeros((1, ids.shape[1], 1, 16)), seed) for seed in range(3))
    return Operands(q, k, v, q_segment_ids=ids, kv_segment_ids=ids)


@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
def test_ranges_are_in_tokens(of_keys):
    """Of blocks of 16 queries and of 32 keys, whichever the kernel holds."""
    found = segment_ranges_of(operands([0, 0, 0, 0, 1, 1]), BLOCK, 2 * BLOCK, of_keys)
    first, second = [0, 4 * BLOCK, 0, 4 * BLOCK], [4 * BLOCK, 6 * BLOCK, 4 * BLOCK, 6 * BLOCK]
    assert found[0].tolist() == ([first] * 2 + [second] if of_keys else [first] * 4 + [second] * 2)


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
