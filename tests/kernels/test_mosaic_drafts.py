"""Drafts after a prefill by Mosaic GPU: the launch of Triton that continues the softmax, compiled without a GPU."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel import lax
from ejkernel.kernels._pallas.gpu.ragged_page_attention import BLOCKS, supports
from ejkernel.kernels._target import lowering_for
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.ragged_page_attention import with_drafts
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention import Outputs

from . import compiler
from .test_mosaic_ragged_page_attention import HOPPER, SLOW, a_call, custom_calls, shapes


@pytest.mark.parametrize("d", [d if d in (128, 256) else pytest.param(d, marks=SLOW) for d in BLOCKS])
@pytest.mark.parametrize("tokens, h, rows", [(64, 8, 64), (4096, 8, 128), (64, 71, 128)])
@pytest.mark.parametrize("limit", (None, 80_000))
def test_tiles_fit_the_gpu(d, tokens, h, rows, limit, monkeypatch):
    """Few tokens have tiles of few rows. Where the environment limits shared memory, those that fit are taken."""
    if limit is not None:
        monkeypatch.setenv(_launch.LIMIT_VARIABLE, str(limit))
    spec, mask = CacheSpec(softmax_scale=0.1), jax.ShapeDtypeStruct((1, tokens, 9), jnp.bool_)
    x = shapes(tokens, h, 1, d, draft_mask=mask)
    if h > 64 and d > 128:
        assert "71 query heads" in supports(spec, x, HOPPER)
        return
    assert supports(spec, x, HOPPER) is None
    zeros = lambda a: None if a is None else jnp.zeros(a.shape, a.dtype)
    found = lambda: Outputs(jnp.zeros(x.q.shape, x.q.dtype), jnp.zeros(x.q.shape[:3]))
    with lowering_for(HOPPER):
        (launch,) = compiler.launches(monkeypatch, _launch, lambda: with_drafts(jax.tree.map(zeros, x), spec, found()))
    binary = compiler.binary(launch, compiler.TARGETS["sm_90"])
    assert binary.shared <= (limit or _launch.shared_memory_limit(HOPPER)) and binary.spilled <= 512
    assert dict(launch.constants)["ROWS"] == rows or limit is not None


@pytest.mark.parametrize("tokens", (640, 1280))
@pytest.mark.parametrize("sequences, decodes", [(3, 0), (70, 1)])
def test_a_step_is_a_prefill_drafts_and_a_decode(sequences, decodes, tokens):
    """Beside work tiles, and the merge of splits of a decode; few sequences have none."""
    x = a_call(tokens, sequences=sequences) | dict(draft_mask=jax.ShapeDtypeStruct((tokens, 40), jnp.bool_))
    found = custom_calls(lambda x: lax.ragged_page_attention(**x), x)
    assert found["mosaic_gpu_v2"] == 1
    assert found["triton_kernel_call"] - 2 in (decodes, 2 * decodes)
