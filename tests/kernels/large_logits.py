"""Logits near 10¹², of which float32 holds every 65536th integer: the error of lse exceeds the range of exponents."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._xla.flash_attention import reference
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs

SPEC = FlashAttentionSpec(causal=True, softmax_scale=0.3)


def normal(seed: int, dtype, length: int, features: int):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((1, length, 2, features)), dtype)


def operands(dtype, length: int = 40, features: int = 16, sinks: bool = False) -> Operands:
    """With sinks, which are the largest logit of some rows."""
    q, k, v = (normal(seed, dtype, length, features) for seed in range(3))
    sinks = jnp.full((1, 2, 1), 1e12, jnp.float32) if sinks else None
    return Operands(1e6 * q, 1e6 * k, v, sinks=sinks)


def check(run: Callable, x: Operands) -> None:
    """Checks that run(outputs, tangents, do) -> gradients of (q, k, v, …), (ȯ, lsė) are finite for any rounding of lse.

    As weights are at most 1, dv is at most Σ_i |do_i|, and the others at most the sum of their terms.
    """
    do = normal(3, x.v.dtype, x.v.shape[1], x.v.shape[3])
    tangents = Operands(x.q, None, do)
    o, lse = reference(*x, spec=SPEC)
    q, k, v, above = (np.abs(np.asarray(a, np.float64)) for a in (x.q, x.k, x.v, do))
    ds = 2 * SPEC.softmax_scale * np.einsum("bshe,bthe->bhst", above, v).max()
    for ulps in (-2, 0, 2):
        (dq, dk, dv, *sinks), moved = run(Outputs(o, lse * (1 + ulps * 2.0**-23)), tangents, do)
        for found in (*moved, *sinks):
            assert np.isfinite(found).all(), ulps
        for found, largest in ((dv, above.sum(1)), (dq, ds * k.sum(1)), (dk, ds * q.sum(1))):
            assert (np.abs(np.asarray(found, np.float64)) <= 1.01 * largest[:, None]).all(), ulps


def of_kernels(backward: Callable, tangent: Callable, x: Operands, spec=SPEC, form=lambda x: x, **config) -> Callable:
    """What `check` runs; of an operation other than flash_attention in the form of its operands, with its spec."""
    wrt = tuple(name for name in ("q", "k", "v", "sinks") if getattr(x, name) is not None)

    def run(outputs, tangents, do):
        gradients = backward(form(x), outputs, Outputs(do, None), wrt=wrt, spec=spec, **config)
        return gradients, tangent(form(x), outputs, form(tangents), spec=spec, **config)

    return run
