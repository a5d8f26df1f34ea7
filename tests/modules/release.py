"""Shared by the tests of the call form of ejkernel 0.0.78: arrays, masks, and attention's formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

B, S, K, H, G, D = 2, 6, 9, 4, 2, 8
RNG = np.random.default_rng(0)


def random(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def qkv(keys=S, depth=D):
    return random(B, S, H, depth), random(B, keys, G, depth), random(B, keys, G, depth)


def formula(q, k, v, visible=True, bias=0.0, sinks=None, scale=None, softcap=None):
    """(o, weights) of softmax attention in float64; rows without visible keys are 0."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = np.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    s = s if softcap is None else softcap * np.tanh(s / softcap)
    e = np.where(visible, np.exp(s), 0)
    total = e.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(np.asarray(sinks, np.float64))[:, None, None])
    weights = np.divide(e, total, out=np.zeros_like(e), where=total > 0)
    return np.einsum("bhij,bjhd->bihd", weights, v), weights


def close(found, expected, tolerance=3e-6):
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance)


def mesh_of(*sizes):
    names = ("dp", "fsdp", "ep", "tp", "sp")
    sizes = dict(zip(names, (1,) * 5, strict=True)) | dict(sizes)
    count = int(np.prod(list(sizes.values())))
    return jax.make_mesh(tuple(sizes.values()), names, devices=jax.devices()[:count], axis_types=(AxisType.Auto,) * 5)


HEADS = P(("dp", "fsdp"), None, "tp", None)
CONTEXT, STARTS = jnp.array([10, 20, 0]), jnp.array([0, 4, 5, 5])


def step(q, k_pages, v_pages, table, sinks=None, scale=None, window=None):
    """The formula of a step: token i of sequence n sees keys up to context − new + i."""
    out = np.zeros(q.shape[:2] + v_pages.shape[-1:])
    for n in range(2):
        k, v = (np.asarray(x)[np.asarray(table)[n]].reshape(1, -1, *x.shape[2:]) for x in (k_pages, v_pages))
        first, last = int(STARTS[n]), int(STARTS[n + 1])
        at = int(CONTEXT[n]) - (last - first) + np.arange(last - first)
        j = np.arange(k.shape[1])
        visible = (j <= at[:, None]) & ((j > at[:, None] - window) if window else True)
        out[first:last] = formula(q[None, first:last], k, v, visible, sinks=sinks, scale=scale)[0][0]
    return out
