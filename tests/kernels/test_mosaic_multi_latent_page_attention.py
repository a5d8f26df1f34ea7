"""multi_latent_page_attention in Mosaic GPU, without a GPU: it lowers, and refuses unsupported calls."""

from dataclasses import replace

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


@pytest.mark.parametrize("h, page", [(1, 64), (16, 16), (16, 128), (32, 64), (80, 64), (128, 16), (128, 128)])
@pytest.mark.parametrize("options", [{}, dict(window=300, softcap=20.0)], ids=str)
def test_lowers(h, page, options):
    spec, sinks = CacheSpec(softmax_scale=0.1, **options), jax.ShapeDtypeStruct((1, h, 1), jnp.float32)
    drafts = jax.ShapeDtypeStruct((1, 300, 40), jnp.bool_)
    more = dict(page=page, dtype=jnp.float16, sinks=sinks)
    for x in (shapes(h=h, page=page), shapes(300, h, **more), shapes(300, h, **more, draft_mask=drafts)):
        with lowering_for(HOPPER):
            assert supports(spec, x, HOPPER) is None
            config = space(spec, x, HOPPER)[0]
            text = lowered(lambda x, c=config: multi_latent_page_attention(*x, spec=spec, config=c), x)
        assert text.count(f"custom_call @{CUSTOM_CALL}") == 1


def of_eight_bits(scales, pages="float8_e4m3fn", **sizes):
    """Operands over pages of eight bits with no scale, one, or those of pages or slots."""
    x = shapes(**sizes)
    shape = {"one": (1, 1, 1), "pages": (1, 600, 1), "slots": x.pages.shape[:3]}.get(scales)
    scale = shape and jax.ShapeDtypeStruct((*shape, 1), jnp.float32)
    return x._replace(pages=jax.ShapeDtypeStruct(x.pages.shape, pages), k_scale=scale)


def listed(keys, **sizes):
    """Operands with lists of so many keys."""
    x = shapes(**sizes)
    return x._replace(indices=jax.ShapeDtypeStruct((1, x.q_latent.shape[1], keys), jnp.int32))


@pytest.mark.parametrize("h, page, keys", [(1, 1, 1), (17, 64, 300), (64, 24, 128), (128, 64, 2048)])
@pytest.mark.parametrize("options", [{}, dict(window=300, softcap=20.0)], ids=str)
def test_lists_lower(h, page, keys, options):
    spec, x = CacheSpec(softmax_scale=0.1, **options), listed(keys, tokens=70, h=h, page=page)
    with lowering_for(HOPPER):
        assert supports(spec, x, HOPPER) is None
        config = space(spec, x, HOPPER)[0]
        text = lowered(lambda x: multi_latent_page_attention(*x, spec=spec, config=config), x)
    assert text.count(f"custom_call @{CUSTOM_CALL}") == 1


@pytest.mark.parametrize("tokens, keys, blocks", [(1, 2048, 16), (8, 2048, 132), (4096, 2048, 4096), (1, 1, 1)])
@pytest.mark.parametrize("h, rows", [(128, 64), (17, 32), (16, 16)])
def test_lists_are_cut_where_there_are_few_tokens(tokens, keys, blocks, h, rows):
    """Into pairs of tiles at most, and so that thread blocks fill the multiprocessors."""
    config = space(SPEC, listed(keys, tokens=tokens, h=h, sequences=1), HOPPER)[0]
    assert (config.heads_per_block, config.queries_per_block) == (rows, 1)
    assert blocks // 2 < tokens * config.num_splits * (h // rows or 1) <= blocks * (h // rows or 1)


@pytest.mark.parametrize(
    "tokens, h, rows",
    [(8, 1, 16), (8, 16, 16), (16, 16, 32), (8, 20, 32), (16, 32, 64), (8, 128, 64), (800, 1, 64)],
)
def test_a_tile_has_rows_for_the_tokens_of_a_sequence(tokens, h, rows):
    config = space(SPEC, shapes(tokens, h), HOPPER)[0]
    assert (config.heads_per_block, config.queries_per_block) == (rows, max(1, rows // h))


@pytest.mark.parametrize("h, sequences, columns, least, most", [(128, 1, 512, 60, 66), (16, 1, 512, 60, 132),
                                                                (16, 128, 64, 1, 1), (128, 128, 64, 1, 1),
                                                                (16, 1, 1, 1, 1), (16, 32, 256, 4, 4)])  # fmt: skip
def test_parts_fill_the_multiprocessors(h, sequences, columns, least, most):
    config = space(SPEC, shapes(sequences, h, sequences, columns), HOPPER)[0]
    assert least <= config.num_splits <= most


def test_a_config_asks_for_rows_that_there_are():
    x = shapes()
    with lowering_for(HOPPER), pytest.raises(ValueError, match="heads_per_block is 8; the kernel takes 16, 32"):
        multi_latent_page_attention(*x, spec=SPEC, config=replace(space(SPEC, x, HOPPER)[0], heads_per_block=8))


@pytest.mark.parametrize(
    "x, spec, reason",
    [
        (shapes(latent=256), SPEC, "256 and 64 features"),
        (shapes(page=24), SPEC, "pages of 24 slots"),
        (shapes(dtype=jnp.float32), SPEC, "q_latent is float32"),
        (shapes(k_scale=jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32)), SPEC, "k_scale with pages of bfloat16"),
        (of_eight_bits("slots", dtype=jnp.float16), SPEC, "k_scale with q_latent in float16"),
        (of_eight_bits("pages"), SPEC, "k_scale is [1, 600, 1]; the kernel takes one, or those of the pages"),
        (
            of_eight_bits("none", draft_mask=jax.ShapeDtypeStruct((1, 8, 4), jnp.bool_)),
            SPEC,
            "draft_mask with pages of",
        ),
        (shapes(), CacheSpec(softmax_scale=-0.1), "it must be > 0"),
        (listed(0, h=64), SPEC, "no tokens, sequences, heads, slots or keys"),
    ],
    ids=("latent", "page", "dtype", "k_scale", "float16", "page scales", "drafts", "scale", "no keys"),
)
def test_refuses(x, spec, reason):
    assert reason in supports(spec, x, HOPPER)
