"""The Hopper forward whose thread blocks take their work tiles from a queue: the same bits, whoever takes which."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention import flash_attention
from ejkernel.kernels._pallas.gpu.flash_attention.configs import space
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands

from .attention_cases import CAUSAL
from .device import ON_HOPPER, TARGET

pytestmark = ON_HOPPER
LENGTHS = {"even": [512] * 8, "uneven": [32, 2500, 1, 700, 863], "one": [4096], "short": [64] * 64}


@pytest.mark.parametrize("spec", [CAUSAL, FlashAttentionSpec()], ids=["causal", "full"])
@pytest.mark.parametrize("features", [64, 128])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_reruns_have_the_bits_of_the_first_run(lengths, features, spec):
    """4096 tokens of 24 heads: up to six work tiles for each multiprocessor. By ends, and by segment ids."""
    heads, keys = (24, 8, 8), jax.random.split(jax.random.key(0), 3)
    normal = lambda key, heads: jax.random.normal(key, (1, 4096, heads, features), jnp.bfloat16)
    q, k, v = map(normal, keys, heads)
    ends = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)[None]
    ids = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths), jnp.int32)[None]
    by_ends = Operands(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends)
    by_ids = Operands(q, k, v, q_segment_ids=ids, kv_segment_ids=ids)
    for x in (by_ends, by_ids):
        config = space("flash_attention", x, spec, TARGET)[0]
        run = jax.jit(lambda x, config=config: flash_attention(*x, spec=spec, config=config))
        first, *others = [jax.tree.map(np.asarray, run(x)) for _ in range(6)]
        for other in others:
            for a, b in zip(first, other, strict=True):
                np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
