"""native_sparse_attention in Mosaic GPU, without a GPU: it lowers, its tiles hold every query, and what it refuses."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._pallas.gpu.native_sparse_attention import configs, native_sparse_attention, supports
from ejkernel.kernels._pallas.gpu.native_sparse_attention.plan import plan_of
from ejkernel.kernels._target import lowering_for
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands

from .mosaic import CUSTOM_CALL, HOPPER, lowered

SPEC = NativeSparseAttentionSpec(64, 0.1)


def shapes(b=1, s=300, t=300, h=64, g=4, d=128, e=128, n=16, dtype=jnp.bfloat16, **others):
    of = jax.ShapeDtypeStruct
    return Operands(
        of((b, s, h, d), dtype), of((b, t, g, d), dtype), of((b, t, g, e), dtype), of((b, s, g, n), jnp.int32), **others
    )


@pytest.mark.parametrize("h, g", [(16, 1), (64, 4), (64, 2), (64, 1)])
@pytest.mark.parametrize("d, e", [(64, 64), (128, 128), (192, 128)])
def test_lowers_in_every_config(h, g, d, e):
    x = shapes(2, 300, 501, h, g, d, e)
    with lowering_for(HOPPER):
        assert supports(SPEC, x, HOPPER) is None
        for config in configs.space("native_sparse_attention", x, SPEC, HOPPER):
            text = lowered(lambda x, c=config: native_sparse_attention(*x, spec=SPEC, config=c), x)
            assert text.count(f"custom_call @{CUSTOM_CALL}") == 1


@pytest.mark.parametrize("block_q", configs.BLOCKS_Q)
@pytest.mark.parametrize("h, queries", [(64, 4), (128, 2), (256, 1)])
def test_a_warpgroup_has_64_rows(block_q, h, queries):
    x = shapes(s=1000, h=h)
    plan = plan_of(x, SPEC, replace(configs.space("native_sparse_attention", x, SPEC, HOPPER)[0], block_q=block_q))
    assert (plan.queries_of_warpgroup, plan.queries) == (queries, queries * block_q // 64)
    assert plan.tiles * plan.queries >= 1000 > (plan.tiles - 1) * plan.queries


@pytest.mark.parametrize("d, e, stages", [(64, 64, (5, 5)), (128, 128, (5, 5)), (192, 128, (3, 4))])
def test_stages_fill_shared_memory(d, e, stages):
    assert tuple(config.num_stages for config in configs.space("", shapes(d=d, e=e), SPEC, HOPPER)) == stages


@pytest.mark.parametrize("change, reason", [
    (dict(block_q=64), "block_q is 64; the kernel takes 192 and 128"),
    (dict(block_k=32), "block_k is 32; the kernel takes 64"),
    (dict(num_stages=1), "num_stages is 1; the kernel takes 2 to 5"),
])  # fmt: skip
def test_refuses_configs(change, reason):
    config = replace(configs.space("native_sparse_attention", shapes(), SPEC, HOPPER)[0], **change)
    assert reason in configs.refuses("native_sparse_attention", config)


def test_stages_that_do_not_fit():
    x = shapes(d=192)
    config = replace(configs.space("native_sparse_attention", x, SPEC, HOPPER)[0], num_stages=4)
    with lowering_for(HOPPER), pytest.raises(ValueError, match="num_stages is 4; 3 fit into shared memory"):
        native_sparse_attention(*x, spec=SPEC, config=config)


@pytest.mark.parametrize(
    "x, spec, reason",
    [
        (shapes(dtype=jnp.float32), SPEC, "q is float32"),
        (shapes(d=96), SPEC, "96 features of keys and 128 of values"),
        (shapes(e=192), SPEC, "128 features of keys and 192 of values"),
        (shapes(h=32), SPEC, "8 query heads share keys; the kernel takes 16, 32, 64"),
        (shapes(), NativeSparseAttentionSpec(32, 0.1), "block_size is 32; the kernel takes multiples of 64"),
        (shapes(), NativeSparseAttentionSpec(64, -0.1), "it must be > 0"),
        (shapes(s=63), SPEC, "63 queries; the kernel takes 64 or more"),
        (shapes(n=0), SPEC, "no empty batch, keys or lists"),
        (shapes(cu_seqlens=jax.ShapeDtypeStruct((1, 3), jnp.int32)), SPEC, "cu_seqlens is not supported"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(x, spec, reason):
    assert reason in supports(spec, x, HOPPER)
