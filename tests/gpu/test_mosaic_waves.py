"""The Hopper forward in several waves of thread blocks: the bits of one wave."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention import flash_attention, plan
from ejkernel.kernels._pallas.gpu.flash_attention.configs import space
from ejkernel.primitives.flash_attention import FlashAttentionSpec

from .attention_cases import CAUSAL, Case
from .device import ON_HOPPER, TARGET

pytestmark = ON_HOPPER


@pytest.mark.parametrize("spec", [CAUSAL, FlashAttentionSpec()], ids=["causal", "full"])
@pytest.mark.parametrize("heads", [60, 64, 97])
def test_waves_have_the_bits_of_one_wave(heads, spec, monkeypatch):
    x, spec = Case("waves", B=1, H=heads, G=1, D=128, V=128, spec=spec).make(plan.LEAST_KEYS_OF_WAVES, jnp.bfloat16)
    config = space("flash_attention", x, spec, TARGET)[0]
    waves = jax.jit(lambda x: flash_attention(*x, spec=spec, config=config)).lower(x).compile()
    monkeypatch.setattr(plan, "LEAST_KEYS_OF_WAVES", np.inf)
    one = jax.jit(lambda x: flash_attention(*x, spec=spec, config=config)).lower(x).compile()
    assert waves.as_text() != one.as_text()
    wanted, found = one(x), [waves(x) for _ in range(5)]
    for result in found:
        for a, b in zip(wanted, result, strict=True):
            np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
