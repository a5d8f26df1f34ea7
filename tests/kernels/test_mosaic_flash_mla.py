"""flash_mla on Hopper, without a GPU: it is lowered to the kernels of flash_attention."""

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel.kernels._dispatch import select
from ejkernel.types import Platform

from .latents import deepseek
from .mosaic import CUSTOM_CALL, HOPPER, lowered

NAMES = ("q", "kv_latent", "k_rope", "w_kc", "w_vc")


def attend(x):
    return ejkernel.lax.flash_mla(**x, causal=True, return_lse=True)


def loss(x):
    o, lse = attend(x)
    return o.astype(jnp.float32).sum() + lse.sum()


@pytest.mark.parametrize(
    "function, kernels", [(attend, 1), (jax.grad(loss), 2), (lambda x: jax.jvp(attend, (x,), (x,)), 2)]
)
def test_lowers(function, kernels):
    """Forward, gradients in all five and tangents, at the sizes of DeepSeek-V3."""
    x, _ = deepseek()
    arrays = dict(zip(NAMES, (*x[:3], *(jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in x[3:5])), strict=True))
    assert lowered(function, arrays).count(f"custom_call @{CUSTOM_CALL}") == kernels


def test_the_library_picks_it():
    x, spec = deepseek()
    for suffix in ("", "_jvp", "_bwd"):
        assert select("flash_mla" + suffix, spec, x, HOPPER).platform == Platform.PALLAS
    x, spec = deepseek(deterministic=True)
    assert select("flash_mla_bwd", spec, x, HOPPER).platform == Platform.PALLAS
