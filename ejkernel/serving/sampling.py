"""Sampling of tokens from logits: greedy, or at a temperature, with top-k and top-p.

The token sampled for a position is a function of the logits, the request's seed and the position alone: it depends
neither on the other requests of a step nor on drafts.
"""

import enum
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..errors import shown


class Kind(enum.IntEnum):
    """The kinds of sampling, each with its own program; a step uses the highest kind of its requests.

    A branch on the device in one program would make the host wait for its condition.
    """

    GREEDY = 0
    DRAWN = 1
    RESTRICTED = 2  # by top_k or top_p, for which logits are sorted


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of a request.

    Attributes:
        max_tokens: the largest number of tokens to generate.
        temperature: the divisor of the logits; 0 takes the most likely token.
        top_k: sample among so many of the most likely tokens, and those as likely as the last of them; 0 for all.
        top_p: of those, sample among the most likely whose probabilities add up to this.
        seed: the seed of the random numbers.
        end: tokens that end the text, of which they are part.
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
                raise ValueError(f"sampling: {name} is {shown(getattr(self, name))}; it must be {rule}")

    @property
    def kind(self) -> Kind:
        """The kind of sampling that this request needs."""
        if self.temperature == 0:
            return Kind.GREEDY
        return Kind.RESTRICTED if self.top_k > 0 or self.top_p < 1 else Kind.DRAWN

    @property
    def of_arrays(self) -> "SamplingArrays":
        """The entries of this request in the arrays of a step."""
        return SamplingArrays(self.temperature, self.top_k, self.top_p, self.seed)


class SamplingArrays(NamedTuple):
    """Sampling parameters of n requests, as arrays [n]: temperature and top_p float32, top_k int32, seed uint32."""

    temperature: Any
    top_k: Any
    top_p: Any
    seed: Any


def sample(logits: Array, positions: Array, sampling: SamplingArrays | None, kind: Kind) -> Array:
    """The tokens int32 [n] sampled from logits [n,vocabulary] for positions [n].

    `kind` is at least the kind of every row. A higher kind gives the same tokens. Only GREEDY takes None.
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
    """The logits, with −∞ for the tokens that top_k and then top_p exclude."""
    vocabulary = logits.shape[-1]
    ordered = -jnp.sort(-logits, axis=-1)
    k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocabulary), vocabulary)[:, None]
    probabilities = jax.nn.softmax(jnp.where(jnp.arange(vocabulary) < k, ordered, -jnp.inf), -1)
    before = jnp.cumsum(probabilities, -1) - probabilities
    # The first token is kept for any top_p; for top_p = 1 all are, though rounded sums may exceed 1 before the last.
    count = jnp.where(sampling.top_p[:, None] < 1, (before < sampling.top_p[:, None]).sum(-1, keepdims=True), k)
    least = jnp.take_along_axis(ordered, jnp.clip(jnp.minimum(count, k) - 1, 0), -1)
    return jnp.where(logits >= least, logits, -jnp.inf)
