"""blocksparse_attention in Mosaic GPU on a Hopper GPU, and Triton's tangent of it, against float64."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels._pallas.gpu import blocksparse_attention as kernels
from ejkernel.kernels._triton import blocksparse_attention as triton
from ejkernel.primitives.flash_attention import FlashAttentionSpec

from .attention_cases import CAUSAL, Case
from .blocksparse_cases import SparseCase
from .device import TARGET
from .test_blocksparse_attention import compare, computed

pytestmark = pytest.mark.gpu
LAYER = Case("layer", H=4, G=2, D=128, V=128, spec=CAUSAL)
PLAIN = replace(LAYER, spec=FlashAttentionSpec())


def check(case: SparseCase, length: int, dtype=jnp.bfloat16):
    x, spec = case.make(length, dtype)
    assert (reason := kernels.supports(spec, x, TARGET)) is None, reason
    has_backward = kernels.supports_bwd(spec, x, TARGET) is None
    assert has_backward or x.sinks is not None or x.q.shape[3] % 64
    backward = kernels.blocksparse_attention_bwd if has_backward else triton.blocksparse_attention_bwd
    compare(
        case,
        length,
        dtype,
        SimpleNamespace(blocksparse_attention=kernels.blocksparse_attention, blocksparse_attention_bwd=backward),
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("axes", ["", "h", "bh"])
@pytest.mark.parametrize("case", [LAYER, PLAIN], ids=["causal", "plain"])
def test_block_masks(case, axes, dtype):
    check(SparseCase(case, axes, (128, 128)), 1024, dtype)


@pytest.mark.parametrize("size", [(128, 256), (256, 128), (384, 192), (128, 640), (1024, 128)], ids=str)
def test_sizes_of_blocks(size):
    check(SparseCase(PLAIN, "h", size), 1024)


@pytest.mark.parametrize("D, V", [(16, 16), (64, 64), (72, 72), (96, 64), (192, 128), (256, 256)])
def test_feature_sizes(D, V):
    check(SparseCase(replace(LAYER, D=D, V=V), "h", (128, 128)), 768)


@pytest.mark.parametrize(
    "spec",
    [
        FlashAttentionSpec(causal=True, window=(256, None)),
        FlashAttentionSpec(window=(384, 256)),
        FlashAttentionSpec(causal=True, softcap=2.0),
        FlashAttentionSpec(softmax_scale=0.3),
    ],
    ids=str,
)
def test_options(spec):
    check(SparseCase(replace(LAYER, spec=spec), "h", (128, 128)), 1280)


@pytest.mark.parametrize("family", ["large", "peaked", "uniform", "rising"])
def test_families(family):
    check(SparseCase(replace(LAYER, family=family), "h", (128, 128)), 1024)


@pytest.mark.parametrize("S, K", [(1.0, 0.9), (0.7, 1.3), (1.0, 1.01)])
def test_uneven_lengths(S, K):
    check(SparseCase(replace(PLAIN, S=S, K=K), "h", (128, 128)), 1000)


@pytest.mark.parametrize("share", [0.0, 0.03, 1.0])
def test_shares(share):
    """None of the blocks, a few, and all of them."""
    check(SparseCase(LAYER, "h", (128, 128), share), 1024)


def test_sinks():
    check(SparseCase(replace(LAYER, sinks=2), "h", (128, 128), 0.3), 1024)


def test_more_tiles_than_multiprocessors():
    check(SparseCase(Case("long", B=1, H=16, G=4, D=128, V=128, spec=CAUSAL), "h", (128, 128), 0.25), 4096)


def test_reruns_give_the_same_bits():
    x, spec = SparseCase(LAYER, "h", (128, 128)).make(2048, jnp.bfloat16)
    first, second = (computed(x, spec, kernels=kernels)[0][0] for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_the_public_function_takes_it():
    x, _ = SparseCase(LAYER, "h", (128, 128)).make(1024, jnp.bfloat16)
    arrays = dict(q=x.q, k=x.k, v=x.v, block_mask=x.block_mask[0])
    assert "pallas/gpu with" in str(ejkernel.explain("blocksparse_attention", **arrays, causal=True))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_scale_that_is_an_operand(softcap):
    spec = FlashAttentionSpec(causal=True, softcap=softcap)
    check(SparseCase(replace(LAYER, scale="b", spec=spec), "h", (128, 128)), 1024)
