"""From logits to tokens: greedy, or drawn at a temperature among the likeliest.

What is drawn for a position is a function of the logits, of the request's seed and of the position alone: the same
whatever else is in the step, and whether or not it was proposed by a draft before.
"""

import enum
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Kind(enum.IntEnum):
    """What a step has to do for the most demanding of its requests; each has its program, without branches in it.

    A branch on the device would have the host wait for what it depends on.
    """

    GREEDY = 0
    DRAWN = 1
    RESTRICTED = 2  # by top_k or top_p, for which logits are sorted


@dataclass(frozen=True)
class Sampling:
    """How a request is continued, and until when.

    Attributes:
        max_tokens: how many tokens are generated at most.
        temperature: by which logits are divided; 0 takes the likeliest token.
        top_k: among how many of the likeliest it is drawn; 0 for all. Those as likely as the last of them stay too.
        top_p: among the likeliest whose probabilities, of those that top_k leaves, come to this.
        seed: of what is drawn.
        end: tokens after any of which the text ends; that token is part of it.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    end: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        bounds = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "at least 0, and finite"),
            "top_k": (0 <= self.top_k < 2**31, "at least 0, where 0 is all tokens, and below 2³¹"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "seed": (0 <= self.seed < 2**32, "at least 0 and below 2³²"),
        }
        for name, (holds, rule) in bounds.items():
            if not holds:
                raise ValueError(f"sampling: {name} is {getattr(self, name)}; it must be {rule}")

    @property
    def kind(self) -> Kind:
        """The least that a step with this request has to be."""
        if self.temperature == 0:
            return Kind.GREEDY
        return Kind.RESTRICTED if self.top_k > 0 or self.top_p < 1 else Kind.DRAWN

    @property
    def of_arrays(self) -> "SamplingArrays":
        """Its entries of the arrays of a step."""
        return SamplingArrays(self.temperature, self.top_k, self.top_p, self.seed)


class SamplingArrays(NamedTuple):
    """The same of many requests, as arrays [n]: temperature and top_p float32, top_k int32, seed uint32."""

    temperature: Any
    top_k: Any
    top_p: Any
    seed: Any


def sample(logits: Array, positions: Array, sampling: SamplingArrays, kind: Kind) -> Array:
    """A token int32 [n] for each row of logits [n,vocabulary], to stand at its position [n].

    No row may ask for more than the kind says; what it asks for holds whatever the kind is.
    """
    greedy = jnp.argmax(logits, -1).astype(jnp.int32)
    if kind == Kind.GREEDY:
        return greedy
    hot = sampling.temperature > 0
    scaled = (logits - logits.max(-1, keepdims=True)) / jnp.where(hot, sampling.temperature, 1.0)[:, None]
    kept = _likeliest(scaled, sampling) if kind == Kind.RESTRICTED else scaled
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))
    tokens = jax.vmap(jax.random.categorical)(keys(sampling.seed, positions), kept)
    return jnp.where(hot, tokens.astype(jnp.int32), greedy)


def _likeliest(logits: Array, sampling: SamplingArrays) -> Array:
    """The logits, −∞ for the tokens that top_k and then top_p leave out."""
    vocabulary = logits.shape[-1]
    ordered = -jnp.sort(-logits, axis=-1)
    k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocabulary), vocabulary)[:, None]
    probabilities = jax.nn.softmax(jnp.where(jnp.arange(vocabulary) < k, ordered, -jnp.inf), -1)
    before = jnp.cumsum(probabilities, -1) - probabilities
    # The first is kept whatever top_p is; with top_p 1 all are, though rounded sums may say otherwise.
    count = jnp.where(sampling.top_p[:, None] < 1, (before < sampling.top_p[:, None]).sum(-1, keepdims=True), k)
    least = jnp.take_along_axis(ordered, jnp.clip(jnp.minimum(count, k) - 1, 0), -1)
    return jnp.where(logits >= least, logits, -jnp.inf)
