"""multi_latent_page_attention over pages of eight bits in Mosaic GPU, without a GPU."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._pallas.gpu.multi_latent_page_attention import multi_latent_page_attention, space, supports
from ejkernel.kernels._pallas.gpu.multi_latent_page_attention.forward import plan_of
from ejkernel.kernels._pallas.gpu.multi_latent_page_attention.plan import (
    CONSUMERS,
    CONVERTING_PRODUCERS,
    K_EMPTY,
    Q_ROUNDED,
)
from ejkernel.kernels._target import lowering_for
from ejkernel.primitives._pages import CacheSpec

from .mosaic import CUSTOM_CALL, HOPPER, lowered
from .test_mosaic_multi_latent_page_attention import of_eight_bits


@pytest.mark.parametrize("h, page", [(16, 16), (16, 64), (32, 32), (80, 16), (128, 128)])
@pytest.mark.parametrize("pages", ("float8_e4m3fn", "int8"))
@pytest.mark.parametrize(
    "scales, dtype", [("none", "float16"), ("none", "bfloat16"), ("one", "bfloat16"), ("slots", "bfloat16")]
)
@pytest.mark.parametrize("keys", (0, 70))
def test_pages_of_eight_bits_lower(h, page, pages, scales, dtype, keys):
    """Queries in bfloat16 are rounded for products in float16 unless slots have scales."""
    spec, x = CacheSpec(softmax_scale=0.1, softcap=20.0), of_eight_bits(scales, pages, h=h, page=page, dtype=dtype)
    if keys:
        x = x._replace(indices=jax.ShapeDtypeStruct((1, x.q_latent.shape[1], keys), jnp.int32))
    with lowering_for(HOPPER):
        assert supports(spec, x, HOPPER) is None
        config = space(spec, x, HOPPER)[0]
        text = lowered(lambda x: multi_latent_page_attention(*x, spec=spec, config=config), x)
    assert text.count(f"custom_call @{CUSTOM_CALL}") == 1
    assert plan_of(x, spec, config).rounds_queries == (scales != "slots" and dtype == "bfloat16")


@pytest.mark.parametrize("rows", CONVERTING_PRODUCERS)
def test_named_barriers_are_after_those_of_all_warpgroups(rows):
    """Mosaic GPU has barrier 1 + n for warpgroup n, and a thread block has sixteen."""
    assert CONSUMERS + CONVERTING_PRODUCERS[rows] < K_EMPTY and Q_ROUNDED < 16
