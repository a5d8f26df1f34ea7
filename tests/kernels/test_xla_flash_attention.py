"""The XLA implementation of flash_attention against its own formula, in float64 and in the precision of its inputs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._xla.flash_attention import flash_attention, flash_attention_bwd, flash_attention_jvp
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .xla_attention import (
    COMBINED,
    FEATURES,
    SMALL,
    case,
    cotangent,
    directions,
    distance,
    normal,
    of_kernel,
    of_reference,
    only,
    plain,
)

pytestmark = pytest.mark.usefixtures("x64")


@partial(jax.jit, static_argnames=("spec", "config"))
def compared(operands, moved, cotangents, spec, config):
    return distance(
        of_kernel(operands, spec, moved, cotangents, config), of_reference(operands, spec, moved, cotangents)
    )


@pytest.mark.parametrize("block", (24, 8))
@pytest.mark.parametrize("causal", (False, True))
def test_of_logits_near_1e12(causal, block):
    """Float32 holds every 65536th integer of such logits: the error of lse exceeds the range of exponents.

    A query has all of its weight on one key: o = v there, dv is a sum of do, and q and k have no derivative.
    """
    q, k, v, do = (normal(2, 24, 2, 32, seed=n).astype(np.float32) for n in range(4))
    x = Operands(q := np.float32(1e6) * q, k := np.float32(1e6) * k, v)
    spec, config = FlashAttentionSpec(causal=causal, softmax_scale=0.3), KernelConfig(block_q=block, block_k=block)

    @jax.jit
    def run(x, do):
        outputs = flash_attention(*x, spec=spec, config=config)
        tangents = flash_attention_jvp(x, outputs, only(q=x.q, v=do), spec=spec, config=config)
        wrt = ("q", "k", "v")
        return (
            outputs.o,
            tangents.o,
            flash_attention_bwd(x, outputs, Outputs(do, None), wrt=wrt, spec=spec, config=config),
        )

    s = np.einsum("bshd,bthd->bhst", q.astype(float), k.astype(float))
    p = np.eye(24)[np.where(np.tri(24, dtype=bool) | (not causal), s, -np.inf).argmax(-1)]
    o, moved, (dq, dk, dv) = run(x, do)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(o, np.einsum("bhst,bthe->bshe", p, v))
    close(dv, np.einsum("bhst,bshe->bthe", p, do))
    assert np.isfinite(moved).all()
    rounding = 1e-6 * 0.3 * np.abs(np.einsum("bshe,bthe->bhst", do, v)).max()
    assert np.abs(dq).max() <= rounding * np.abs(k).max() and np.abs(dk).max() <= rounding * np.abs(q).max()


@pytest.mark.parametrize("name", [*FEATURES, *COMBINED])
def test_equals_the_formula_in_float64(name):
    operands, spec = case(name)
    errors = compared(operands, directions(operands), cotangent(operands, spec), spec=spec, config=SMALL)
    assert max(jax.tree.leaves(errors)) < 1e-13, errors


def test_blocks_change_nothing():
    """Sinks join once and dropout keeps the same weights, for any blocks."""
    operands, spec = case("causal", "sinks", "dropout")

    @partial(jax.jit, static_argnums=(0, 1))
    def run(block_q, block_k):
        config = KernelConfig(block_q=block_q, block_k=block_k)
        outputs = flash_attention(*operands, spec=spec, config=config)
        given = cotangent(operands, spec)
        return outputs, flash_attention_bwd(
            operands, outputs, given, wrt=("q", "k", "v", "sinks"), spec=spec, config=config
        )

    assert max(jax.tree.leaves(distance(run(16, 5), run(64, 64)))) < 1e-13


# --- Precision --------------------------------------------------------------------------------------------------------


def peaks(q, k):
    """Queries that point at one key each."""
    at = np.random.default_rng(0).integers(0, k.shape[1] - q.shape[1], q.shape[1])
    towards = np.repeat(k[:, at], q.shape[2] // k.shape[2], axis=2)
    return 8 * q.shape[-1] ** 0.5 * towards / np.linalg.norm(towards, axis=-1, keepdims=True)


FAMILIES = {
    "normal": lambda q, k: q,
    "large_logits": lambda q, k: 30 * q,
    "one_hot_peaks": peaks,
    "long_uniform_rows": lambda q, k: 1e-3 * q,
}


@partial(jax.jit, static_argnames=("spec", "config"))
def errors_of_both(operands, moved, cotangents, spec, config):
    """The errors of kernel and formula in one precision against float64; and the last bit of the largest number."""
    wide = lambda x: jax.tree.map(lambda a: a.astype(jnp.float64), x)
    truth = of_reference(wide(operands), spec, wide(moved), wide(cotangents))
    error = lambda found: jax.tree.map(lambda a, b: jnp.abs(a.astype(jnp.float64) - b).max(), found, truth)
    kernel = of_kernel(operands, spec, moved, cotangents, config)
    last_bit = jax.tree.map(lambda a, b: jnp.finfo(a.dtype).eps * jnp.abs(b).max(), kernel, truth)
    return error(kernel), error(of_reference(operands, spec, moved, cotangents)), last_bit


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16), ids=lambda x: jnp.dtype(x).name)
def test_errors_are_bounded_by_those_of_the_formula(dtype):
    """At most twice as large in the forward and three times in derivatives, counting from the last bit."""
    spec = FlashAttentionSpec(causal=True, softmax_scale=32**-0.5)
    q, k, v = plain(b=1, s=48, t=640, h=2, g=1, d=32, e=32)[:3]
    for name, queries in FAMILIES.items():
        operands = Operands(*(jnp.asarray(x, dtype) for x in (queries(q, k), k, v)))
        found = errors_of_both(
            operands, directions(operands), cotangent(operands, spec), spec, KernelConfig(block_q=32, block_k=128)
        )
        for part, factor, *errors in zip(("forward", "tangent", "gradient"), (2, 3, 3), *found, strict=True):
            for kernel, formula, last_bit in zip(*map(jax.tree.leaves, errors), strict=True):
                assert kernel <= factor * max(formula, last_bit), (name, part, errors)
