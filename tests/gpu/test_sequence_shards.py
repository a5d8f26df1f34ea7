"""Sequences over two GPUs or more, by GPU kernels, equal those on one GPU; so does a step of decoding."""

import jax
import pytest
from cases import assert_close
from test_merge_attention_shards import dense, over_devices, whole
from test_sequence_shards import check_precision, long

SIZES = [size for size in (2, 4, 8) if jax.default_backend() == "gpu" and size <= len(jax.devices())]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not SIZES, reason="there are no two GPUs")]


@pytest.mark.parametrize("size", SIZES or (2,))
@pytest.mark.parametrize("tokens", (30, 1000))
def test_gla_errs_as_the_formula_does(tokens, size):
    """With 2,048 tokens on each."""
    check_precision(long(tokens, b=1, s=2048 * size, h=4, g=2, d=64, e=64), size)


@pytest.mark.parametrize("size", SIZES or (2,))
def test_a_dense_cache(size):
    x = dense(1024)
    assert_close(over_devices(size)(x), whole(x), 1e-3)
