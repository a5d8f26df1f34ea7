"""flash_attention in e4m3 on a Hopper GPU: its error against float64, beside that of the formula with its roundings."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention import flash_attention
from ejkernel.kernels._pallas.gpu.flash_attention.configs import space
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands

from .attention_cases import CAUSAL, Case, check
from .device import ON_HOPPER, TARGET
from .oracle import visible

pytestmark = ON_HOPPER
CASES = [
    Case("plain"),
    Case("causal, grouped heads", H=4, spec=CAUSAL),
    Case("uneven", S=0.83, K=1.27),
    Case("window", spec=FlashAttentionSpec(causal=True, window=(20, None))),
    Case("softcap", spec=FlashAttentionSpec(softcap=2.0)),
    Case("sinks", sinks=2, spec=CAUSAL),
    Case("segments", segments=True),
    Case("large logits", family="large", spec=CAUSAL),
    Case("uniform", family="uniform", K=4.0),
    Case("rising", family="rising", K=4.0),
]


def formula(x: Operands, spec: FlashAttentionSpec, in_e4m3):
    """o and lse in float64, with `in_e4m3` around what the kernel rounds: q, k, v, and the weights."""
    q, k, v = (np.asarray(y.astype(jnp.float32), np.float64) for y in x[:3])
    group = q.shape[2] // k.shape[2]
    by_head = lambda y: in_e4m3(y, np.abs(y).max((1, 3), keepdims=True) / 448)
    q, k, v = by_head(q), *(np.repeat(by_head(y), group, 2) for y in (k, v))
    s = np.einsum("bshd,bthd->bhst", q, k) * spec.softmax_scale
    if spec.softcap is not None:
        s = spec.softcap * np.tanh(s / spec.softcap)
    s = np.where(visible(x, spec), s, -np.inf)
    sinks = np.full((1, q.shape[2], 1), -np.inf) if x.sinks is None else np.asarray(x.sinks, np.float64)
    top = np.maximum(s.max(-1), sinks.max(-1)[:, :, None])
    base = np.where(np.isfinite(top), top, 0)
    weights = np.exp(s - base[..., None])
    total = weights.sum(-1) + np.exp(sinks[:, :, None] - base[..., None]).sum(-1)
    with np.errstate(divide="ignore"):
        lse = base + np.log(total)
    p = in_e4m3(weights, 1 / 256) / np.where(total == 0, 1, total)[..., None]
    return np.einsum("bhst,bthe->bshe", p, v), lse


def to_e4m3(x, scale):
    return (x / scale).astype(np.float32).astype(jnp.float8_e4m3fn).astype(np.float64) * scale


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("D, V", [(64, 64), (128, 128), (192, 128)])
def test_error(case, D, V):
    x, spec = replace(case, D=D, V=V).make(600, jnp.bfloat16)
    config = replace(space("flash_attention", x, spec, TARGET)[0], block_q=128, block_k=128, algorithm="e4m3")
    outputs = jax.jit(lambda x: flash_attention(*x, spec=spec, config=config))(x)
    exact, rounded = formula(x, spec, lambda x, scale: x), formula(x, spec, to_e4m3)
    for name, result, *references in zip(("o", "lse"), outputs, exact, rounded, strict=True):
        check(name, np.asarray(result.astype(jnp.float32)), *references, factor=2)
