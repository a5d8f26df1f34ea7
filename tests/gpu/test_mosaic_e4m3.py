"""flash_attention in e4m3 on a Hopper GPU: its error against float64, beside that of the formula with its roundings."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention import flash_attention
from ejkernel.kernels._pallas.gpu.flash_attention.quantized import LIMITS, greatest_of, rotation
from ejkernel.kernels._pallas.gpu.flash_attention.rounding import rounded
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import KernelConfig

from .attention_cases import CAUSAL, Case, check
from .device import ON_HOPPER
from .oracle import visible

pytestmark = ON_HOPPER
BLOCK = 128
CASES = [
    Case("plain"),
    Case("causal, grouped heads", H=4, spec=CAUSAL),
    Case("uneven", S=0.83, K=1.27),
    Case("window", spec=FlashAttentionSpec(causal=True, window=(20, None))),
    Case("softcap", spec=FlashAttentionSpec(softcap=2.0)),
    Case("sinks", sinks=2, spec=CAUSAL),
    Case("segments", segments=True),
    Case("large logits", family="large", spec=CAUSAL),
    Case("negative logits", family="negative", spec=CAUSAL),
    Case("uniform", family="uniform", K=4.0),
    Case("rising", family="rising", K=4.0),
    Case("decaying", family="decaying", K=4.0),
]


def formula(x: Operands, spec: FlashAttentionSpec, in_e4m3, in_float16):
    """o and lse in float64, with the given functions around the numbers that the kernel rounds.

    The rotated q and k, v, and the weights, whose largest is about 2⁴, are rounded to e4m3; the weights and their
    exponents also to float16.
    """
    q, k, v = (np.asarray(y.astype(jnp.float32), np.float64) for y in x[:3])
    group, matrix = q.shape[2] // k.shape[2], rotation(q.shape[3])
    q, k = q @ matrix, k @ np.linalg.inv(matrix).T
    in_blocks = lambda y, most: in_e4m3(y, unit(np.repeat(greatest_of_blocks(y), BLOCK, 1)[:, : y.shape[1]], most))
    q, k, v = map(in_blocks, (q, k, v), greatest_of(q.shape[3]))
    k, v = (np.repeat(y, group, 2) for y in (k, v))
    s = np.einsum("bshd,bthd->bhst", q, k) * spec.softmax_scale
    if spec.softcap is not None:
        s = spec.softcap * np.tanh(s / spec.softcap)
    s = np.where(visible(x, spec), s, -np.inf) / np.log(2)
    sinks = np.full((1, q.shape[2], 1), -np.inf) if x.sinks is None else np.asarray(x.sinks, np.float64) / np.log(2)
    top = np.round(np.maximum(s.max(-1), sinks.max(-1)[:, :, None]))
    base = np.where(np.isfinite(top), top, 0) - 4
    weights = in_float16(np.exp2(in_float16(s - base[..., None])))
    total = weights.sum(-1) + np.exp2(sinks[:, :, None] - base[..., None]).sum(-1)
    with np.errstate(divide="ignore"):
        lse = (base + np.log2(total)) * np.log(2)
    p = in_e4m3(weights, 1) / np.where(total == 0, 1, total)[..., None]
    return np.einsum("bhst,bthe->bshe", p, v), lse


def greatest_of_blocks(x):
    """[b, blocks, heads, 1] of [b, keys, heads, features]."""
    blocks = np.pad(np.abs(x), [(0, 0), (0, -x.shape[1] % BLOCK), (0, 0), (0, 0)])
    return np.maximum(blocks.reshape(x.shape[0], -1, BLOCK, *x.shape[2:]).max((2, 4))[..., None], 1e-30)


def unit(greatest, most):
    """The least power of two in units of which the largest number is at most `most`."""
    return 2.0 ** np.ceil(np.log2(greatest / most))


def to_e4m3(x, scale):
    return (x / scale).astype(np.float32).astype(jnp.float8_e4m3fn).astype(np.float64) * scale


@pytest.mark.parametrize("block_q, block", [(128, 64), (128, 128), (192, 64), (192, 128)])
def test_rounded(block_q, block):
    """Half a unit in the last place of q, k and v, with the keys of v in the order of the weights in a thread."""
    x, _ = Case("rounded", H=4, G=2, D=128, V=64).make(328, jnp.bfloat16)
    (q8, k8, v8), (q_scales, k_scales, p_scales_log2, v_scales) = jax.jit(lambda *x: rounded(*x, block_q, block))(
        *x[:3]
    )
    thread, n = np.divmod(np.arange(384) % 16, 4)
    order = np.arange(384) // 16 * 16 + 2 * thread + np.array([0, 1, 8, 9])[n]
    originals = (*x[:2], jnp.pad(x.v, [(0, 0), (0, 56), (0, 0), (0, 0)])[:, order])
    scales = q_scales, k_scales, v_scales[..., None] * 2 ** (p_scales_log2 - LIMITS.p_scale_log2)
    results, lengths = (q8, k8, v8.transpose(0, 3, 1, 2)), (block_q, block, block)
    for *arrays, length, most in zip(results, originals, scales, lengths, greatest_of(128), strict=True):
        result, exact, scale = (np.asarray(y.astype(jnp.float32), np.float64) for y in arrays)
        scale = scale.transpose(0, 2, 1)[:, np.arange(exact.shape[1]) // length, :, None]
        assert most / 2 <= np.abs(result).max() <= most and (np.log2(scale) % 1 == 0).all()
        assert (np.abs(result * scale - exact) <= 1.001 * np.maximum(np.abs(exact) / 16, scale / 1024)).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("D, V", [(64, 64), (128, 128), (192, 128)])
def test_error(case, D, V):
    compare(replace(case, D=D, V=V), 192, 128)


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
@pytest.mark.parametrize("D, block_q, block_k", [(128, 128, 64), (128, 128, 128), (128, 192, 64), (256, 128, 128)])
def test_error_of_blocks(case, D, block_q, block_k):
    compare(replace(case, D=D, V=D), block_q, block_k)


@pytest.mark.parametrize("factor", [1, 4, 32, 1024])
def test_great_logits(factor):
    """Logits of which float16 does not hold every integer, and then none: the largest still decide.

    Keys are different, and each query is like one of them: its logit is the square of their length. Rounded to three
    bits after the first a number errs by e, 0.026 of it on the root mean square, and its square by 2e; the rotated
    numbers are as normally distributed ones, so that Σx²·2e / Σx² of 128 has the deviation 2·0.026·√(3 / 128) = 0.008.
    """
    shape = 1, 300, 2, 128
    keys = factor * jnp.sign(jax.random.normal(jax.random.key(0), shape)).astype(jnp.bfloat16)
    values = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    like = jax.random.permutation(jax.random.key(2), shape[1])
    o, lse = run(Operands(keys[:, like], keys, values), FlashAttentionSpec(softmax_scale=1.0), 192, 128)
    of_floats = lambda x: np.asarray(x.astype(jnp.float32))
    np.testing.assert_allclose(of_floats(o), of_floats(values[:, like]), rtol=1 / 8, atol=1 / 64)
    errors = np.asarray(lse, np.float64) / (128 * factor**2) - 1
    assert np.sqrt((errors**2).mean()) < 0.01 and np.abs(errors).max() < 5 * 0.008


def test_zeros():
    """Tiles of q and blocks of k of zeros, as padding has them, under a mask: the means of the values so far."""
    x, _ = Case("zeros", D=128, V=128).make(600, jnp.bfloat16)
    x = x._replace(q=0 * x.q, k=0 * x.k)
    exact = formula(x, CAUSAL, lambda x, scale: x, lambda x: x)
    rounded = formula(x, CAUSAL, to_e4m3, lambda x: x)
    o, lse = run(x, CAUSAL, 192, 128)
    check("o", np.asarray(o.astype(jnp.float32)), exact[0], rounded[0], factor=2)
    np.testing.assert_allclose(lse, exact[1], rtol=1e-6, atol=1e-6)


def compare(case, block_q, block_k):
    x, spec = case.make(600, jnp.bfloat16)
    exact = formula(x, spec, lambda x, scale: x, lambda x: x)
    rounded = formula(x, spec, to_e4m3, lambda x: x.astype(np.float16).astype(np.float64))
    results = run(x, spec, block_q, block_k)
    for name, result, *references in zip(("o", "lse"), results, exact, rounded, strict=True):
        check(name, np.asarray(result.astype(jnp.float32)), *references, factor=2)


def run(x, spec, block_q, block_k):
    config = KernelConfig(block_q=block_q, block_k=block_k, num_stages=2)
    return jax.jit(lambda x: flash_attention(*x, spec=replace(spec, precision="e4m3"), config=config))(x)
