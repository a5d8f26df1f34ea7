"""blocksparse_attention in Mosaic GPU, without a GPU: it lowers, and lists and orders are those of the block mask."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._block_lists import entries_of, full_first, longest_first
from ejkernel.kernels._pallas.gpu.blocksparse_attention import (
    blocksparse_attention,
    blocksparse_attention_bwd,
    supports,
    supports_bwd,
)
from ejkernel.kernels._target import lowering_for
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.primitives.flash_attention import Outputs
from ejkernel.types import Target

HOPPER = Target("cuda", "NVIDIA H200")
SLOW = pytest.mark.slow


def shapes(s=512, t=512, h=4, g=2, d=128, e=128, block=(128, 128), dtype=jnp.bfloat16, **others):
    of = jax.ShapeDtypeStruct
    blocks = -(-s // block[0]), -(-t // block[1])
    return Operands(
        of((1, s, h, d), dtype), of((1, t, g, d), dtype), of((1, t, g, e), dtype), of((1, h, *blocks), bool), **others
    )


@pytest.mark.parametrize(
    "d, e, options",
    [
        (128, 128, dict(causal=True)),
        pytest.param(64, 64, dict(window=(256, 0)), marks=SLOW),
        pytest.param(256, 256, {}, marks=SLOW),
        pytest.param(72, 96, dict(causal=True, softcap=20.0), marks=SLOW),
    ],
    ids=str,
)
def test_lowers(d, e, options):
    x, spec = shapes(d=d, e=e), BlocksparseAttentionSpec(**options)
    assert supports(spec, x, HOPPER) is None
    f = partial(blocksparse_attention, spec=spec, config=blocksparse_attention.heuristic(spec, x, HOPPER))
    with lowering_for(HOPPER):
        text = jax.jit(f).trace(*x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 1


@pytest.mark.parametrize("d, options", [(64, dict(causal=True)), pytest.param(256, dict(softcap=20.0), marks=SLOW)])
def test_the_backward_lowers(d, options):
    x, spec = shapes(d=d, e=d), BlocksparseAttentionSpec(**options)
    assert supports_bwd(spec, x, HOPPER) is None
    config = blocksparse_attention_bwd.heuristic(spec, x, HOPPER)
    outputs = Outputs(jax.ShapeDtypeStruct(x.q.shape, x.q.dtype), jax.ShapeDtypeStruct((1, 4, 512), jnp.float32))
    f = partial(blocksparse_attention_bwd, wrt=("q", "k", "v"), spec=spec, config=config)
    with lowering_for(HOPPER):
        text = jax.jit(f).trace(x, outputs, outputs).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    "x, spec, reason",
    [
        (shapes(), BlocksparseAttentionSpec(causal=True), None),
        (shapes(block=(512, 512)), BlocksparseAttentionSpec(causal=True, block_size=(512, 512)), None),
        (shapes(block=(64, 64)), BlocksparseAttentionSpec(block_size=(64, 64)), "is (64, 64); no tile size"),
        (shapes(t=520), BlocksparseAttentionSpec(), None),
        (shapes(t=520), BlocksparseAttentionSpec(causal=True), "no tile size of the Mosaic GPU kernels divides it"),
        (shapes(), BlocksparseAttentionSpec(window=(100, 500)), "no tile size of the Mosaic GPU kernels divides it"),
        (shapes(cu_seqlens_q=jax.ShapeDtypeStruct((1, 3), jnp.int32)), BlocksparseAttentionSpec(), "cu_seqlens_q"),
    ],
)  # fmt: skip
def test_what_it_takes(x, spec, reason):
    found = supports(spec, x, HOPPER)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("n", (1, 2, 7, 16, 17, 129, 1000))
def test_lists(n):
    rng = np.random.default_rng(n)
    kept, full = rng.random((2, 3, n)) < 0.3, rng.random((2, 3, n)) < 0.5
    entries, (length, of_full, blocks) = jax.jit(entries_of)(kept), jax.jit(full_first)(kept, full)
    order = longest_first(length)
    for i in np.ndindex(2, 3):
        full_ones, others = (np.flatnonzero(chosen[i]).tolist() for chosen in (kept & full, kept & ~full))
        behind = [n] * int(n - kept[i].sum())
        assert entries[i].tolist() == sorted(full_ones + others) + behind
        assert blocks[i].tolist() == full_ones + others + behind
        assert (length[i], of_full[i]) == (kept[i].sum(), (kept & full)[i].sum())
    for i in range(2):
        assert order[i].tolist() == np.lexsort((np.arange(3), -kept[i].sum(-1))).tolist()
