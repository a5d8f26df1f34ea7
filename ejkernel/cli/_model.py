"""The language model of the demo: decoder-only, with grouped-query heads, RoPE, RMSNorm and SwiGLU.

Its layers mix tokens by attention or by gated linear attention, and may have experts in the place of one MLP. The
operations are an argument, so that one model runs on `ejkernel.lax` and on the plain formulas in `_formulas`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..serving.model import rms_norm, rope

Parameters = dict[str, Any]


class Operations(NamedTuple):
    """The operations of the model, with the names and arguments of `ejkernel.lax`."""

    flash_attention: Callable[..., Any]
    gla: Callable[..., Any]
    grouped_matmul: Callable[..., Any]


@dataclass(frozen=True)
class Model:
    """The size of the model. A layer whose window is None attends to all earlier tokens; gated linear layers all do.

    With experts each token is computed by two of them, each half as wide as the one MLP.
    """

    vocabulary: int = 128
    width: int = 128
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 320
    windows: tuple[int | None, ...] = (64, None, None, None)
    softcap: float = 30.0
    mixer: str = "attention"
    experts: int = 0

    @property
    def operations(self) -> tuple[str, ...]:
        """The names of the operations that it uses."""
        return ("gla" if self.mixer == "gla" else "flash_attention", *["grouped_matmul"] * (self.experts > 0))


def initialise(model: Model, key: Array) -> Parameters:
    """Normal weights of variance 1 / fan-in, divided by 2 · layers for those that write to the residual stream."""
    keys = iter(jax.random.split(key, 2 + 8 * len(model.windows)))
    normal = lambda shape, fan_in, gain=1.0: gain * fan_in**-0.5 * jax.random.normal(next(keys), shape)
    d, h, g, e, f = model.width, model.heads, model.kv_heads, model.head_dim, model.hidden
    residual = (2 * len(model.windows)) ** -0.5
    each, f = ((model.experts,), f // 2) if model.experts else ((), f)

    def layer():
        weights = {
            "query": normal((d, h, e), d),
            "key_value": normal((d, 2, g, e), d),
            "output": normal((h, e, d), h * e, residual),
            "gate": normal((*each, d, f), d),
            "up": normal((*each, d, f), d),
            "down": normal((*each, f, d), f, residual),
            "attention_norm": jnp.ones(d),
            "mlp_norm": jnp.ones(d),
        }
        weights |= {"decay": normal((d, h, e), d)} if model.mixer == "gla" else {}
        return weights | ({"router": normal((d, model.experts), d)} if model.experts else {})

    return {
        "embedding": normal((model.vocabulary, d), 1),
        "layers": [layer() for _ in model.windows],
        "norm": jnp.ones(d),
        "head": normal((d, model.vocabulary), d),
    }


def logits(
    model: Model,
    operations: Operations,
    parameters: Parameters,
    tokens: Array,
    dtype: Any,
    states: Any = None,
    positions: Any = None,
) -> tuple[Array, Any]:
    """The logits [b,s,vocabulary] float32 that follow tokens [b,s], and the states of gated linear layers.

    The layers compute in `dtype`, and start from `states` if given. `positions` [s] of the tokens are 0 to s − 1 by
    default.
    """
    w = jax.tree.map(lambda x: x.astype(dtype), parameters)
    x = w["embedding"][tokens]
    after, positions = [], jnp.arange(tokens.shape[1]) if positions is None else jnp.asarray(positions)
    for i, (layer, window) in enumerate(zip(w["layers"], model.windows, strict=True)):
        h = rms_norm(x, layer["attention_norm"])
        q = jnp.einsum("bsd,dhe->bshe", h, layer["query"])
        k, v = jnp.moveaxis(jnp.einsum("bsd,dcge->bscge", h, layer["key_value"]), 2, 0)
        if model.mixer == "gla":
            # Decays near 1, as in arXiv 2312.06635: a sixteenth of a log-sigmoid.
            gk = jax.nn.log_sigmoid(jnp.einsum("bsd,dhe->bshe", h, layer["decay"]).astype(jnp.float32)) / 16
            initial_state = None if states is None else states[i]
            o, state = operations.gla(positive(q), positive(k), v, gk, initial_state, return_state=True)
            o, after = rms_norm(o, 1), [*after, state]
        else:
            q, k = rope(q, positions), rope(k, positions)
            o = operations.flash_attention(q, k, v, causal=True, window=window, softcap=model.softcap)
        x = x + jnp.einsum("bshe,hed->bsd", o, layer["output"])
        h = rms_norm(x, layer["mlp_norm"])
        x = x + (experts(operations, layer, h) if model.experts else mlp(layer, h))
    return (rms_norm(x, w["norm"]) @ w["head"]).astype(jnp.float32), after


def mlp(layer: Parameters, x: Array) -> Array:
    """SwiGLU: (silu(x · gate) ∘ (x · up)) · down."""
    return (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


def experts(operations: Operations, layer: Parameters, x: Array) -> Array:
    """SwiGLU by the two experts with the highest router probabilities of each token [b,s,d], weighted by these."""
    rows = x.reshape(-1, x.shape[-1])
    # In float32, as in arXiv 2101.03961: in fewer tokens two experts have equal probabilities.
    routed = jnp.matmul(rows, layer["router"], preferred_element_type=jnp.float32)
    given, chosen = jax.lax.top_k(jax.nn.softmax(routed), 2)
    order = jnp.argsort(chosen.reshape(-1))  # rows sorted by expert
    sizes = jnp.bincount(chosen.reshape(-1), length=layer["router"].shape[1])
    of = lambda rows, name: operations.grouped_matmul(rows, layer[name], sizes, preferred_element_type=x.dtype)
    sent = rows[order // 2]
    out = of(jax.nn.silu(of(sent, "gate")) * of(sent, "up"), "down")
    weighted = out * given.reshape(-1)[order, None].astype(x.dtype)
    return jnp.zeros_like(rows).at[order // 2].add(weighted).reshape(x.shape)


# --- Text


def sample(
    model: Model, operations: Operations, parameters: Parameters, prompt: Array, keys: Array, dtype: Any
) -> Array:
    """Continues `prompt` [s] by a token for each key, sampled from the logits of the last s tokens."""

    def draw_next(window, key):
        token = draw(logits(model, operations, parameters, window[None], dtype)[0][0, -1], key)
        return jnp.roll(window, -1).at[-1].set(token), token

    return jax.lax.scan(draw_next, prompt, keys)[1].astype(prompt.dtype)


def sample_by_state(
    model: Model, operations: Operations, parameters: Parameters, prompt: Array, keys: Array, dtype: Any
) -> Array:
    """As `sample`, but one token at a time from the recurrent states, which depend on all earlier tokens."""
    first, states = logits(model, operations, parameters, prompt[None], dtype)

    def draw_next(carried, key):
        last, states = carried
        token = draw(last, key)
        following, states = logits(model, operations, parameters, token[None, None], dtype, states)
        return (following[0, -1], states), token

    return jax.lax.scan(draw_next, (first[0, -1], states), keys)[1].astype(prompt.dtype)


def drawn_at_once(
    model: Model, operations: Operations, parameters: Parameters, text: Array, keys: Array, dtype: Any
) -> Array:
    """The last tokens of `text`, one for each key, sampled from the logits of one forward pass over the whole text."""
    every = logits(model, operations, parameters, text[None, :-1], dtype)[0][0]
    return jax.vmap(draw)(every[-len(keys) :], keys).astype(text.dtype)


def draw(logits: Array, key: Array) -> Array:
    """A token sampled at temperature 0.7."""
    return jax.random.categorical(key, logits / 0.7)


# --- Parts


def cross_entropy(logits: Array, targets: Array) -> Array:
    """The mean cross entropy in nats per token."""
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def positive(x: Array) -> Array:
    """elu(x) + 1, the features of arXiv 2006.16236.

    The o of the first token is (q·k) v, of which the norm keeps only the sign of q·k: where q·k crosses zero the loss
    would jump, and two trainings that differ by rounding would diverge. With positive features q·k is positive.
    """
    return jax.nn.elu(x) + 1
