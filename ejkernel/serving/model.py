"""A decoder-only language model whose attention is an argument: over a paged cache, or over whole texts.

RMSNorm, rotary embeddings, grouped-query heads and SwiGLU, as in Llama (arXiv 2302.13971). Every layer has its own
arrays: slices of stacked ones would be copied in each step of decoding, which is bound by memory. Over several devices
the heads, the hidden features of the MLP and the vocabulary are sharded, with two all-reduces in each layer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Integer, Key, UInt32

from .. import lax

HEADS = "heads"
"""The axis of a mesh over which weights and caches are sharded."""
Weights = dict[str, Any]
Attend = Callable[[Array, Array, Array, int | None, Any], tuple[Array, Any]]
"""(q, k, v, window, cache of the layer) → o, and the cache with k and v in it."""


@dataclass(frozen=True)
class Decoder:
    """The size of the model. A layer with a window attends to so many tokens, one with None to all earlier ones.

    With `tied` the embedding is also the output matrix.
    """

    vocabulary: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    windows: tuple[int | None, ...]
    softcap: float | None = None
    rope_base: float = 10_000.0
    tied: bool = False


LLAMA_1B = Decoder(128_256, 2048, 32, 8, 64, 8192, (None,) * 16, rope_base=500_000.0, tied=True)
"""The shape of Llama 3.2 1B."""


def joined(weights: Weights) -> Weights:
    """The weights of a decoder with one array for all products of the same features.

    The layers given have `query` [d,heads,e], `key_value` [d,2,kv_heads,e], `gate` and `up` [d,f] in their place.
    """
    separate = ("query", "key_value", "gate", "up")

    def layer(w: Weights) -> Weights:
        d, _, groups, features = w["key_value"].shape
        parts = w["query"].reshape(d, groups, -1, features), w["key_value"].swapaxes(1, 2)
        one = {"query_key_value": jnp.concatenate(parts, 2), "gate_up": jnp.stack([w["gate"], w["up"]], 1)}
        return one | {name: x for name, x in w.items() if name not in separate}

    return weights | {"layers": [layer(w) for w in weights["layers"]]}


def random_weights(
    decoder: Decoder,
    key: Key[Array, ""] | UInt32[Array, " words"],
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
) -> Weights:
    """Normal weights of variance 1 / fan-in, made on the devices that hold them."""
    shapes, structure = jax.tree_util.tree_flatten_with_path(weight_shapes(decoder), is_leaf=_is_shape)
    weights = []
    for (path, shape), own_key in zip(shapes, jax.random.split(key, len(shapes)), strict=True):
        name = path[-1].key
        make = partial(_draw, shape=shape, inputs=_INPUT_AXES.get(name, 0), dtype=dtype)
        weights.append(jax.jit(make, out_shardings=None if mesh is None else _sharding(mesh, name))(own_key))
    return structure.unflatten(weights)


def _draw(key: Array, shape: tuple[int, ...], inputs: int, dtype: Any) -> Array:
    """Ones for the scale of a norm; normal weights for a matrix, whose first `inputs` axes are contracted."""
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    return (jax.random.normal(key, shape, dtype) * math.prod(shape[:inputs]) ** -0.5).astype(dtype)


def weight_shapes(decoder: Decoder) -> Weights:
    """The shapes of the weights, as a tree of the same structure."""
    d, h, g, e, f = decoder.width, decoder.heads, decoder.kv_heads, decoder.head_dim, decoder.hidden
    layer = {
        "query_key_value": (d, g, h // g + 2, e),
        "output": (h, e, d),
        "gate_up": (d, 2, f),
        "down": (f, d),
        "attention_norm": (d,),
        "mlp_norm": (d,),
    }
    shapes = {"embedding": (decoder.vocabulary, d), "layers": [dict(layer) for _ in decoder.windows], "norm": (d,)}
    return shapes if decoder.tied else shapes | {"head": (d, decoder.vocabulary)}


_INPUT_AXES = {"query_key_value": 1, "output": 2, "gate_up": 1, "down": 1, "head": 1}
_is_shape = lambda x: isinstance(x, tuple)

# The spec of each weight that is sharded over devices; the others are replicated.
_PARTITION = {
    "embedding": P(HEADS),
    "head": P(None, HEADS),
    "query_key_value": P(None, HEADS),
    "output": P(HEADS),
    "gate_up": P(None, None, HEADS),
    "down": P(HEADS),
}


def _sharding(mesh: Mesh, name: str) -> NamedSharding:
    return NamedSharding(mesh, _PARTITION.get(name, P()))


def place(weights: Weights, mesh: Mesh) -> Weights:
    """The weights on the devices of a mesh with the axis `heads`."""
    put = lambda path, x: jax.device_put(x, _sharding(mesh, path[-1].key))
    return jax.tree_util.tree_map_with_path(put, weights)


# --- The forward pass -------------------------------------------------------------------------------------------------


def hidden_states(
    decoder: Decoder,
    weights: Weights,
    tokens: Integer[Array, "*batch tokens"],
    positions: Integer[Array, "*#batch tokens"],
    attend: Attend,
    caches: list[Any],
) -> tuple[Float[Array, "*batch tokens width"], list[Any]]:
    """The features of tokens at their positions, and the updated caches of the layers."""
    x = weights["embedding"].at[tokens].get(out_sharding=_whole())
    after = []
    for layer, window, cache in zip(weights["layers"], decoder.windows, caches, strict=True):
        h = rms_norm(x, layer["attention_norm"])
        q, k, v = of_heads(jnp.einsum("...d,dghe->...ghe", h, layer["query_key_value"]))
        q, k = (rope(each, positions, decoder.rope_base) for each in (q, k))
        o, cache = attend(q, k, v, window, cache)
        x = x + jnp.einsum("...he,hed->...d", o, layer["output"], out_sharding=_whole())
        x = x + mlp(layer, rms_norm(x, layer["mlp_norm"]))
        after.append(cache)
    return rms_norm(x, weights["norm"]), after


def logits_of(weights: Weights, x: Float[Array, "*tokens width"]) -> Float32[Array, "*tokens vocabulary"]:
    """The logits of the next token, from features."""
    matrix, spec = (weights["head"], "...d,dv->...v") if "head" in weights else (weights["embedding"], "...d,vd->...v")
    logits = jnp.einsum(spec, x, matrix, preferred_element_type=jnp.float32)
    return logits if _whole() is None else jax.sharding.reshard(logits, P())


def logits_of_text(
    decoder: Decoder, weights: Weights, tokens: Integer[Array, "batch length"]
) -> Float[Array, "batch length vocabulary"]:
    """The logits after every token of whole texts, without a cache."""

    def attend(q, k, v, window, cache):
        return lax.flash_attention(q, k, v, causal=True, window=window, softcap=decoder.softcap), cache

    positions = jnp.arange(tokens.shape[1])
    return logits_of(
        weights, hidden_states(decoder, weights, tokens, positions, attend, [None] * len(decoder.windows))[0]
    )


# --- Parts ------------------------------------------------------------------------------------------------------------


def of_heads(x: Array) -> tuple[Array, Array, Array]:
    """q [...,heads,e], k and v [...,kv_heads,e], of [...,kv_heads,c,e]: first the query heads that share them."""
    *batch, groups, count, features = x.shape
    q = x[..., :-2, :].reshape(*batch, groups * (count - 2), features)
    return q, x[..., -2, :], x[..., -1, :]


def mlp(layer: Weights, x: Array) -> Array:
    """SwiGLU: (silu(x · gate) ∘ (x · up)) · down."""
    gate, up = jnp.moveaxis(jnp.einsum("...d,dcf->...cf", x, layer["gate_up"]), -2, 0)
    h = jax.nn.silu(gate) * up
    return jnp.matmul(h, layer["down"], out_sharding=_whole())


def rms_norm(x: Array, scale: Array | float) -> Array:
    """x / √mean(x²), scaled; the mean in float32."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale


def rope(x: Array, positions: Array, base: float = 10_000.0) -> Array:
    """Rotates the pairs (x_i, x_{i + e/2}) of [...,tokens,heads,e] by the angle position / base^(2i/e)."""
    half = x.shape[-1] // 2
    angle = positions[..., None] * base ** (-jnp.arange(half) / half)
    cos, sin = (f(angle)[..., None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def _whole() -> P | None:
    """The sharding of replicated arrays; None without a mesh."""
    return None if jax.sharding.get_abstract_mesh().empty else P()
