"""multi_latent_page_attention in Mosaic GPU, without a GPU: it lowers, and refuses what it does not compute."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._pallas.gpu.multi_latent_page_attention import multi_latent_page_attention, space, supports
from ejkernel.kernels._target import lowering_for
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.multi_latent_page_attention import Operands

from .mosaic import CUSTOM_CALL, HOPPER, lowered

SPEC = CacheSpec(softmax_scale=0.1)


def shapes(tokens=8, h=16, sequences=8, columns=64, page=64, latent=512, rope=64, dtype=jnp.bfloat16, **others):
    """Operands of the primitive, [b = 1, …]."""
    of = jax.ShapeDtypeStruct
    integers = dict(
        context_lens=(1, sequences), block_tables=(1, sequences, columns), query_start_loc=(1, sequences + 1),
        num_seqs=(1, 1),
    )  # fmt: skip
    return Operands(
        q_latent=of((1, tokens, h, latent), dtype),
        q_rope=of((1, tokens, h, rope), dtype),
        pages=of((1, 600, page, latent + rope), dtype),
        **{name: of(shape, jnp.int32) for name, shape in integers.items()},
        **others,
    )


@pytest.mark.parametrize("h", (1, 16, 80, 128))
@pytest.mark.parametrize("page", (16, 64, 128))
@pytest.mark.parametrize("options", [{}, dict(window=300, softcap=20.0)], ids=str)
def test_lowers(h, page, options):
    spec, sinks = CacheSpec(softmax_scale=0.1, **options), jax.ShapeDtypeStruct((1, h, 1), jnp.float32)
    for x in (shapes(h=h, page=page), shapes(300, h, page=page, dtype=jnp.float16, sinks=sinks)):
        with lowering_for(HOPPER):
            assert supports(spec, x, HOPPER) is None
            config = space(spec, x, HOPPER)[0]
            text = lowered(lambda x, c=config: multi_latent_page_attention(*x, spec=spec, config=c), x)
        assert text.count(f"custom_call @{CUSTOM_CALL}") == 1


@pytest.mark.parametrize(
    "x, spec, reason",
    [
        (shapes(latent=256), SPEC, "256 and 64 features"),
        (shapes(page=24), SPEC, "pages of 24 slots"),
        (shapes(dtype=jnp.float32), SPEC, "q_latent is float32"),
        (shapes(k_scale=jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32)), SPEC, "k_scale is not supported"),
        (shapes(), CacheSpec(softmax_scale=-0.1), "it must be > 0"),
    ],
    ids=("latent", "page", "dtype", "k_scale", "scale"),
)
def test_refuses(x, spec, reason):
    assert reason in supports(spec, x, HOPPER)
