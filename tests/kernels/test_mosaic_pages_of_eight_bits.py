"""ragged_page_attention over pages of eight bits in Mosaic GPU, without a GPU: it lowers, and its resources."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._pallas.gpu._launch import FIRST_BARRIER
from ejkernel.kernels._pallas.gpu.flash_attention.configs import SHARED_BYTES
from ejkernel.kernels._pallas.gpu.ragged_page_attention import BLOCKS, least_decodes, supports
from ejkernel.kernels._pallas.gpu.ragged_page_attention.forward import plan_of, prefill
from ejkernel.kernels._target import lowering_for
from ejkernel.primitives._pages import CacheSpec

from .test_mosaic_ragged_page_attention import HOPPER, SLOW, custom_calls, shapes

PAGES = (jnp.float8_e4m3fn, jnp.int8)
of_shape = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
SLOTS = dict(k_scale=of_shape(1, 64, 64, 2), v_scale=of_shape(1, 64, 64, 2))


@pytest.mark.parametrize("d", [d if d == 128 else pytest.param(d, marks=SLOW) for d in BLOCKS])
@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize(
    "dtype, scales",
    [
        ("bfloat16", {}),
        ("bfloat16", SLOTS),
        ("bfloat16", dict(k_scale=of_shape(1, 1, 1, 2))),
        ("bfloat16", dict(SLOTS, v_scale=of_shape(1, 1, 1, 1))),
        ("float16", dict(v_scale=of_shape(1, 1, 1, 2))),
    ],
    ids=str,
)
def test_lowers(dtype, scales, pages, d):
    """Tiles of two warpgroups and of one."""
    spec = CacheSpec(softmax_scale=0.1)
    for tokens in (640, 64):
        x = shapes(tokens, d=d, dtype=jnp.dtype(dtype), pages=pages, **scales)
        with lowering_for(HOPPER):
            assert supports(spec, x, HOPPER) is None
            assert custom_calls(lambda x: prefill(x, spec, 16), x)["mosaic_gpu_v2"] == 1


@pytest.mark.parametrize("d", BLOCKS)
@pytest.mark.parametrize("tokens", (64, 640))
@pytest.mark.parametrize("scales", ({}, SLOTS), ids=("none", "of slots"))
def test_shared_memory_and_registers_suffice(scales, tokens, d):
    with lowering_for(HOPPER):
        plan = plan_of(shapes(tokens, d=d, pages=jnp.int8, **scales), CacheSpec())
    assert plan.bytes_of_tiles(plan.q_stages, plan.page_stages) <= SHARED_BYTES
    consumer, *others = plan.registers
    assert plan.consumers * consumer + sum(others) <= 512
    assert FIRST_BARRIER < plan.v_empty + plan.stages <= 16


@pytest.mark.parametrize("reason, x", [
    ("sequences of 28 tokens", dict(tokens=70, sequences=10)),
    ("a head dim of 96; the kernel takes multiples of 64", dict(d=96)),
    ("v_scale of slots with q in float16", dict(dtype=jnp.float16, v_scale=of_shape(1, 64, 64, 2))),
    ("k_scale of slots is [2, 64, 64, 2]", dict(k_scale=of_shape(2, 64, 64, 2))),
    ("k_scale of slots is [1, 64, 64, 1]", dict(k_scale=of_shape(1, 64, 64, 1))),
])  # fmt: skip
def test_calls_left_to_other_implementations_give_a_reason(reason, x):
    assert reason in supports(CacheSpec(), shapes(pages=jnp.int8, **x), HOPPER)


def test_decodes_beside_prefills_are_left_to_triton():
    assert least_decodes(shapes(sequences=70), CacheSpec(), HOPPER) is not None
    assert least_decodes(shapes(sequences=70, pages=jnp.int8), CacheSpec(), HOPPER) is None
