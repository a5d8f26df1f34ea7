"""The tiles of ragged_page_attention in Mosaic GPU, and in how many launches a step is computed."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel import lax
from ejkernel.kernels._pallas.gpu.flash_attention.configs import SHARED_BYTES
from ejkernel.kernels._pallas.gpu.ragged_page_attention import BLOCKS, blocks_of, least_decodes
from ejkernel.kernels._pallas.gpu.ragged_page_attention.forward import plan_of
from ejkernel.kernels._target import lowering_for
from ejkernel.primitives._pages import CacheSpec

from .test_mosaic_ragged_page_attention import HOPPER, a_call, custom_calls, shapes


@pytest.mark.parametrize("tokens, rows", [(128, 64), (144, 128)])
def test_sequences_of_few_rows_have_tiles_of_one_warpgroup(tokens, rows):
    """Of four heads that share keys, and eight sequences: 16 tokens fill 64 rows."""
    x = shapes(tokens, sequences=8)
    assert blocks_of(x, CacheSpec())[0] == rows and blocks_of(x, CacheSpec(batch_invariant=True))[0] == 128
    assert custom_calls(lambda x: lax.ragged_page_attention(**x), a_call(tokens, sequences=8))["mosaic_gpu_v2"] == 1


@pytest.mark.parametrize("tokens", (128, 640))
@pytest.mark.parametrize("d", BLOCKS)
def test_tiles_fit(d, tokens):
    """Into shared memory, and into the 16 named barriers: a GPU stops at an instruction with a 17th."""
    with lowering_for(HOPPER):
        plan = plan_of(shapes(tokens, d=d, sequences=8), CacheSpec())
    assert plan.bytes_of_tiles(plan.q_stages, plan.page_stages) <= SHARED_BYTES and plan.v_empty + plan.stages <= 16


@pytest.mark.parametrize("h, g, decodes", [(32, 8, 17), (16, 1, 132), (8, 8, 17)])
def test_so_many_decodes_that_each_multiprocessor_has_one_have_tiles_beside_prefills(h, g, decodes):
    """Unless a plan divides them, or bits may not depend on how many there are."""
    x = shapes(640, h, g, sequences=200)
    of = lambda x, **options: least_decodes(x, CacheSpec(**options), HOPPER)
    assert of(x) == decodes and of(x, batch_invariant=True) is None
    assert of(x._replace(plan=jax.ShapeDtypeStruct((1, 1, 132, 8), jnp.int32))) is None


@pytest.mark.parametrize("sequences, columns, launches", [(66, 20, 1), (3, 80, 2)])
def test_a_step_of_few_sequences_is_one_launch(sequences, columns, launches):
    """Two key/value heads have one tile for each of 132 multiprocessors. Of Triton are the work tiles, and the merge of
    long sequences that are split. Not so where bits may not depend on the number of sequences.
    """
    x = a_call(sequences=sequences, columns=columns)
    calls = lambda **options: custom_calls(lambda x: lax.ragged_page_attention(**x, **options), x)["triton_kernel_call"]
    assert calls() == launches and calls(batch_invariant=True) > launches
