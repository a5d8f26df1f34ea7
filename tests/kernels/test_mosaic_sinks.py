"""Sinks in flash_attention on Mosaic GPU: the part that XLA computes, compared with the implementation in XLA."""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention import backward, flash_attention_bwd, tangent
from ejkernel.kernels._xla import flash_attention as xla
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from . import large_logits

SPEC = large_logits.SPEC
# The rounding of an lse to float32, in units of its last place.
ULPS = (-2, 0, 2)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.fixture
def dsinks(monkeypatch):
    """dsinks of a call, which the kernel does not compute."""

    def without_kernel(q, k, v, do, start, delta, mask_info, pairs, softmax_scale, plan):
        return jnp.zeros(q.shape, jnp.float32), jnp.zeros_like(k), jnp.zeros_like(v)

    def run(x: Operands, outputs: Outputs, do, spec: FlashAttentionSpec):
        config = KernelConfig(block_q=64, block_k=128, num_stages=2)
        return flash_attention_bwd(x, outputs, Outputs(do, None), wrt=("sinks",), spec=spec, config=config)[0]

    monkeypatch.setattr(backward, "_gradients", without_kernel)
    return run


def test_gradients_of_sinks(dsinks):
    q, k, v, do = (normal(seed, 1, 40, 2, 64) for seed in range(4))
    x = Operands(q, k, v, sinks=normal(4, 1, 2, 3))
    outputs = xla.reference(*x, spec=SPEC)
    (expected,) = xla.flash_attention_bwd(x, outputs, Outputs(do, None), wrt=("sinks",), spec=SPEC)
    np.testing.assert_allclose(dsinks(x, outputs, do, SPEC), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ulps", ULPS)
def test_gradients_of_sinks_near_1e12_are_bounded(dsinks, ulps):
    """A weight is at most 1, so |dsink| ≤ Σ_i |do_i · o_i|."""
    x = large_logits.operands(jnp.float32, features=64, sinks=True)
    do = normal(3, *x.v.shape)
    o, lse = xla.reference(*x, spec=SPEC)
    found = dsinks(x, Outputs(o, lse * (1 + ulps * 2.0**-23)), do, SPEC)
    largest = np.abs(np.asarray(do * o, np.float64).sum(-1)).sum(1)
    assert (np.abs(np.asarray(found[..., 0], np.float64)) <= 1.01 * largest).all()


@pytest.mark.parametrize("ulps", ULPS)
def test_what_sinks_move_near_1e12_is_bounded(ulps):
    """Of weights that are at most 1, |Σ_n p_n · sink_dot_n| ≤ Σ_n |sink_dot_n|."""
    x = large_logits.operands(jnp.float32, sinks=True)
    lse = xla.reference(*x, spec=SPEC).lse * (1 + ulps * 2.0**-23)
    sinks_dot = normal(5, *x.sinks.shape)
    moved = tangent._sinks_moved(x, lse, Operands(None, None, None, sinks=sinks_dot))
    assert (np.abs(moved) <= np.abs(sinks_dot).sum(-1)[:, :, None]).all()


def test_what_sinks_move():
    x = Operands(None, None, None, sinks=normal(0, 1, 2, 3))
    lse = 3 + jnp.abs(normal(1, 1, 2, 5)).at[0, 0, 0].set(jnp.inf)
    sinks_dot = normal(2, 1, 2, 3)
    expected = np.einsum("bhsn,bhn->bhs", np.exp(x.sinks[:, :, None, :] - lse[..., None]), sinks_dot)
    found = tangent._sinks_moved(x, lse, Operands(None, None, None, sinks=sinks_dot))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
