"""A Qwen3 of 0.6B parameters in plain JAX that learns random tokens; its attention is an argument.

This module imports nothing of the library: the process of the release on PyPI trains the same model.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Attention = Callable[[Array, Array, Array], Array]
LEARNING_RATE, DECAYS, WEIGHT_DECAY, EPSILON = 3e-4, (0.9, 0.95), 0.1, 1e-8
ROPE_BASE, NORM_EPSILON = 1e6, 1e-6


@dataclass(frozen=True)
class Sizes:
    """The sizes of Qwen3 0.6B and of a step; with `checkpoint` a layer is recomputed in its backward."""

    layers: int = 28
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    feed_forward: int = 3072
    vocabulary: int = 151936
    batch: int = 6
    length: int = 4096
    checkpoint: bool = False


def as_easydel_calls(flash_attention: Callable[..., Array], mask_info: Any, **options: Any) -> Attention:
    """The call of EasyDeL 0.3.0's flash_attn2 on one device, for causal training on sequences without padding.

    `mask_info` is the class MaskInfo, with which EasyDeL's models make segment ids; None for causality alone.
    """

    def attention(q: Array, k: Array, v: Array) -> Array:
        info = mask_info and mask_info.dynamic_init(input_ids=jnp.zeros(q.shape[:2], jnp.int32))
        given = dict(dropout_prob=0.0, sliding_window=None, logits_soft_cap=None, normalize_output=True)
        given |= dict(mask_info=info, causal=True, precision=lax.Precision.DEFAULT)
        return flash_attention(q, k, v, None, None, None, None, **given, **options)

    return attention


# --- The model


def initial(sizes: Sizes, key: Array) -> dict[str, Any]:
    """Parameters in bfloat16, those of all layers stacked."""
    keys = iter(jax.random.split(key, 8))
    normal = lambda *shape: (0.02 * jax.random.normal(next(keys), shape)).astype(jnp.bfloat16)
    ones = lambda *shape: jnp.ones(shape, jnp.bfloat16)
    n, d, f = sizes.layers, sizes.hidden, sizes.feed_forward
    of_layers = dict(
        q=normal(n, d, sizes.heads, sizes.head_dim),
        k=normal(n, d, sizes.kv_heads, sizes.head_dim),
        v=normal(n, d, sizes.kv_heads, sizes.head_dim),
        o=normal(n, sizes.heads, sizes.head_dim, d),
        gate=normal(n, d, f),
        up=normal(n, d, f),
        down=normal(n, f, d),
        norm_attention=ones(n, d),
        norm_feed_forward=ones(n, d),
        norm_q=ones(n, sizes.head_dim),
        norm_k=ones(n, sizes.head_dim),
    )
    return dict(embedding=normal(sizes.vocabulary, d), norm=ones(d), layers=of_layers)


@jax.checkpoint
def rms_norm(x: Array, weight: Array) -> Array:
    """RMSNorm in float32, without a float32 residual."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide**2).mean(-1, keepdims=True) + NORM_EPSILON)).astype(x.dtype) * weight


@jax.checkpoint
def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) · up."""
    return jax.nn.silu(gate) * up


def rope(x: Array) -> Array:
    """x [B, S, H, D] with each pair of features (i, i + D/2) rotated by the angle of its position."""
    half = x.shape[-1] // 2
    frequencies = ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies)[:, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def layer(attention: Attention, x: Array, w: dict[str, Array]) -> tuple[Array, None]:
    """x [B, S, hidden] after attention and the feed-forward network; the form of `lax.scan`."""
    y = rms_norm(x, w["norm_attention"])
    q, k, v = (jnp.einsum("bsd,dhe->bshe", y, w[name]) for name in "qkv")
    o = attention(rope(rms_norm(q, w["norm_q"])), rope(rms_norm(k, w["norm_k"])), v)
    x = x + jnp.einsum("bshe,hed->bsd", o, w["o"])
    y = rms_norm(x, w["norm_feed_forward"])
    return x + swiglu(y @ w["gate"], y @ w["up"]) @ w["down"], None


def loss_of(attention: Attention, checkpoint: bool, parameters: dict[str, Any], tokens: Array) -> Array:
    """The mean cross-entropy of the next token of tokens [B, S + 1]; the logits of one sequence exist at a time."""
    embedding = parameters["embedding"]
    x = embedding.astype(jnp.float32)[tokens[:, :-1]].astype(embedding.dtype)
    of_layer = partial(layer, attention)
    x, _ = lax.scan(jax.checkpoint(of_layer) if checkpoint else of_layer, x, parameters["layers"])
    x = rms_norm(x, parameters["norm"])

    @jax.checkpoint
    def of_sequence(total: Array, given: tuple[Array, Array]) -> tuple[Array, None]:
        of, targets = given
        logits = jnp.einsum("sd,vd->sv", of, embedding, preferred_element_type=jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[:, None], 1)[:, 0]
        return total + (jax.nn.logsumexp(logits, -1) - chosen).sum(), None

    total, _ = lax.scan(of_sequence, jnp.zeros((), jnp.float32), (x, tokens[:, 1:]))
    return total / (x.shape[0] * x.shape[1])


# --- Training


def adamw(count: Array, parameter: Array, gradient: Array, first: Array, second: Array) -> tuple[Array, Array, Array]:
    """The parameter and its two moments, which are float32, after step `count` (from 1)."""
    g, wide = gradient.astype(jnp.float32), parameter.astype(jnp.float32)
    first = DECAYS[0] * first + (1 - DECAYS[0]) * g
    second = DECAYS[1] * second + (1 - DECAYS[1]) * g**2
    unbiased = [m / (1 - decay**count) for m, decay in zip((first, second), DECAYS, strict=True)]
    update = unbiased[0] / (jnp.sqrt(unbiased[1]) + EPSILON) + WEIGHT_DECAY * wide
    return (wide - LEARNING_RATE * update).astype(parameter.dtype), first, second


class Training:
    """A model and its optimizer on a device; every attention trains the same model on the same tokens."""

    def __init__(self, sizes: Sizes, attention: Attention) -> None:
        self.sizes = sizes
        parameters = jax.jit(partial(initial, sizes))(jax.random.key(0))
        zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), parameters)
        self._state = parameters, zeros(), zeros(), jnp.zeros((), jnp.float32)
        shape = sizes.batch, sizes.length + 1
        self._tokens = jax.random.randint(jax.random.key(1), shape, 0, sizes.vocabulary, jnp.int32)
        began = time.perf_counter()
        self.traced = jax.jit(partial(_step, attention, sizes.checkpoint), donate_argnums=0).trace(
            self._state, self._tokens
        )
        self._step = self.traced.lower().compile()
        self.compile_seconds = time.perf_counter() - began

    def run(self, steps: int) -> dict[str, float | None]:
        """Trains: the seconds of all steps, the loss before the last of them, and the peak memory so far."""
        jax.block_until_ready(self._state)
        began = time.perf_counter()
        for _ in range(steps):
            self._state, loss = self._step(self._state, self._tokens)
        jax.block_until_ready(self._state)
        seconds = time.perf_counter() - began
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return dict(seconds=seconds, loss=float(loss), peak_gigabytes=peak and peak / 1e9)


def _step(attention: Attention, checkpoint: bool, state: tuple, tokens: Array) -> tuple[tuple, Array]:
    parameters, first, second, count = state
    loss, gradient = jax.value_and_grad(partial(loss_of, attention, checkpoint))(parameters, tokens)
    count = count + 1
    updated = jax.tree.map(partial(adamw, count), parameters, gradient, first, second)
    parts = jax.tree.transpose(jax.tree.structure(parameters), jax.tree.structure((0, 0, 0)), updated)
    return (*parts, count), loss
