"""flash_attention on TPU: results, in the interpreter that simulates the chip, finds races and poisons new memory."""

import functools

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._pallas.tpu.flash_attention import (
    flash_attention,
    flash_attention_bwd,
    flash_attention_jvp,
)
from ejkernel.types import KernelConfig
from tests.gpu.attention_cases import CASES, check_near, differentiable, like, poisoned, poisoned_cotangents

from . import large_logits
from .tpu_interpreter import interpreted

# Tiles of one chunk, for which a normal run has time.
SMALL = 200, KernelConfig(block_q=128, block_k=128)
QUICK = {
    ("packed, window, sinks", "float32"): SMALL,
    ("peaks", "float32"): SMALL,
    ("sinks, more queries", "float32"): SMALL,
    ("packed, from later on", "float32"): SMALL,
    ("segments, mask", "float32"): SMALL,
    ("bias of hardly a key", "float32"): SMALL,
    ("large logits", "bfloat16"): (200, KernelConfig(block_q=256, block_k=256)),
    # Tiles with some fully masked chunks, in the forward and in the others.
    ("window", "bfloat16"): (520, KernelConfig(block_q=128, block_k=512)),
    ("grouped heads", "bfloat16"): (200, KernelConfig(block_q=128, block_k=128, algorithm="split")),
}
# Tiles of several chunks, with more of them in flight than there are, or fewer.
LARGE = 300, KernelConfig(block_q=128, block_k=256, num_stages=3)
LARGE_SPLIT = 300, KernelConfig(block_q=256, block_k=256, num_stages=1, algorithm="split")


def calls():
    for case in CASES:
        for dtype in ("float32", "bfloat16"):
            if case.spec.dropout_rate:
                continue
            name = f"{case.name}, {dtype}"
            if (case.name, dtype) in QUICK:
                yield pytest.param(case, dtype, *QUICK[case.name, dtype], id=name)
            large = LARGE if dtype == "float32" else LARGE_SPLIT
            yield pytest.param(case, dtype, *large, id=f"{name}, large", marks=pytest.mark.slow)


@pytest.mark.parametrize("case, dtype, length, config", list(calls()))
def test_in_the_interpreter(case, dtype, length, config):
    """Forward, backward and tangent, with NaN in unread entries."""
    x, spec = case.make(length, jnp.dtype(dtype))
    wrt = differentiable(x)
    tangents = x._replace(**{name: like(getattr(x, name), 1) if name in wrt else None for name in x._fields})

    @interpreted
    def run(x, tangents, cotangents):
        outputs = flash_attention(*x, spec=spec, config=config)
        gradients = flash_attention_bwd(x, outputs, cotangents, wrt=wrt, spec=spec, config=config)
        moved = flash_attention_jvp(x, outputs, tangents, spec=spec, config=config)
        return outputs, dict(zip(wrt, gradients, strict=True)), moved

    cotangents = like(jax.eval_shape(functools.partial(flash_attention, spec=spec, config=config), *x), 2)
    given = poisoned(x, spec), poisoned(x, spec, tangents), poisoned_cotangents(cotangents, x, spec)
    check_near(run(*given), x, spec, cotangents, tangents._asdict(), jnp.dtype(dtype))


@pytest.mark.parametrize("dtype, config", [("float32", SMALL[1]), ("bfloat16", LARGE_SPLIT[1])])
def test_gradients_of_logits_near_1e12(dtype, config):
    x = large_logits.operands(jnp.dtype(dtype), sinks=True)
    run = large_logits.of_kernels(flash_attention_bwd, flash_attention_jvp, x, config=config)
    large_logits.check(interpreted(run), x)
