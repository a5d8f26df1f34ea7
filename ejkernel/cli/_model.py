"""The language model of the demo: decoder-only, with grouped-query heads, RoPE, RMSNorm and SwiGLU.

The attention is an argument, so that one model runs on `ejkernel.lax.flash_attention` and on the plain formula below.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Attention = Callable[..., Array]
Parameters = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """The size of the model. Layers whose window is None see everything before them."""

    vocabulary: int = 128
    width: int = 128
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 320
    windows: tuple[int | None, ...] = (64, None, None, None)
    softcap: float = 30.0


def initialise(model: Model, key: Array) -> Parameters:
    """Normal weights of variance 1 / fan-in; those that write to the residual stream, smaller by its depth."""
    keys = iter(jax.random.split(key, 2 + 6 * len(model.windows)))
    normal = lambda shape, fan_in, gain=1.0: gain * fan_in**-0.5 * jax.random.normal(next(keys), shape)
    d, h, g, e, f = model.width, model.heads, model.kv_heads, model.head_dim, model.hidden
    residual = (2 * len(model.windows)) ** -0.5
    layer = lambda: {
        "query": normal((d, h, e), d),
        "key_value": normal((d, 2, g, e), d),
        "output": normal((h, e, d), h * e, residual),
        "gate": normal((d, f), d),
        "up": normal((d, f), d),
        "down": normal((f, d), f, residual),
        "attention_norm": jnp.ones(d),
        "mlp_norm": jnp.ones(d),
    }
    return {
        "embedding": normal((model.vocabulary, d), 1),
        "layers": [layer() for _ in model.windows],
        "norm": jnp.ones(d),
        "head": normal((d, model.vocabulary), d),
    }


def logits(model: Model, attention: Attention, parameters: Parameters, tokens: Array, dtype: Any) -> Array:
    """Tokens [b,s] to the logits of the next one [b,s,vocabulary] float32; the layers compute in `dtype`."""
    w = jax.tree.map(lambda x: x.astype(dtype), parameters)
    x = w["embedding"][tokens]
    for layer, window in zip(w["layers"], model.windows, strict=True):
        h = rms_norm(x, layer["attention_norm"])
        q = rope(jnp.einsum("bsd,dhe->bshe", h, layer["query"]))
        k, v = jnp.moveaxis(jnp.einsum("bsd,dcge->bscge", h, layer["key_value"]), 2, 0)
        o = attention(q, rope(k), v, causal=True, window=window, softcap=model.softcap)
        x = x + jnp.einsum("bshe,hed->bsd", o, layer["output"])
        h = rms_norm(x, layer["mlp_norm"])
        x = x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    return (rms_norm(x, w["norm"]) @ w["head"]).astype(jnp.float32)


def sample(
    model: Model, attention: Attention, parameters: Parameters, prompt: Array, count: int, key: Array, dtype: Any
) -> Array:
    """Continues `prompt` [s] by `count` tokens, each drawn at temperature 0.7 from what the last s tokens predict."""

    def draw(window, key):
        last = logits(model, attention, parameters, window[None], dtype)[0, -1]
        token = jax.random.categorical(key, last / 0.7).astype(window.dtype)
        return jnp.roll(window, -1).at[-1].set(token), token

    return jax.lax.scan(draw, prompt, jax.random.split(key, count))[1]


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Nats per token."""
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def plain_attention(q: Array, k: Array, v: Array, *, causal: bool, window: int | None, softcap: float) -> Array:
    """The formula that the kernels are measured against: softmax(softcap·tanh(q·kᵀ / (√D softcap)), masked)·v."""
    batch, length, heads, dim = q.shape
    q = q.reshape(batch, length, k.shape[2], -1, dim)
    s = jnp.einsum("bigrd,bjgd->bgrij", q, k, preferred_element_type=jnp.float32) / math.sqrt(dim)
    s = softcap * jnp.tanh(s / softcap)
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    seen = (distance >= 0) & (distance < (window or length)) if causal else distance == distance
    p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), -1).astype(v.dtype)
    return jnp.einsum("bgrij,bjge->bigre", p, v).reshape(batch, length, heads, dim)


def rms_norm(x: Array, scale: Array) -> Array:
    """x / √mean(x²), scaled; the mean in float32."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale


def rope(x: Array) -> Array:
    """Rotates the pairs (x_i, x_{i + e/2}) of [b,s,h,e] by the angle position / 10000^(2i/e)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angle)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)
