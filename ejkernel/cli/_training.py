"""How the demo trains: Adam (arXiv 1412.6980) with a warm-up and a cosine, one jitted step, the loss of every step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ._context_parallel import ContextParallel
from ._model import Model, Operations, Parameters, cross_entropy, initialise, logits

_PEAK_RATE, _WARM_UP = 3e-3, 20
_DECAY = 0.9, 0.95


@dataclass(frozen=True)
class Training:
    """The result: the loss of each step in nats, the parameters, and the step as a jaxpr and as optimised HLO."""

    losses: np.ndarray
    parameters: Parameters
    jaxpr: Any
    hlo: str


def train(
    model: Model,
    operations: Operations,
    excerpts: np.ndarray,
    key: Array,
    dtype: Any,
    show: Callable[[int, str], None],
    context: ContextParallel | None = None,
) -> Training:
    """Trains one step on each of `excerpts` [steps, batch, length + 1]; `context` shards the sequences."""
    total = len(excerpts)
    positions = slice(None) if context is None else context.order
    place = (lambda x: x) if context is None else context.sharded
    loss = partial(_loss, model, operations, dtype, positions=None if context is None else context.order)
    pairs = lambda tokens: (place(tokens[:, :-1][:, positions]), place(tokens[:, 1:][:, positions]))

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(parameters, first, second, done, pair):
        value, gradients = jax.value_and_grad(loss)(parameters, *pair)
        rate = _PEAK_RATE * jnp.minimum((done + 1) / _WARM_UP, 1.0) * (1 + jnp.cos(jnp.pi * done / total)) / 2
        return *adam(parameters, gradients, first, second, done + 1, rate), value

    parameters = initialise(model, key)
    if context is not None:
        parameters = context.replicated(parameters)
    first, second = (jax.tree.map(jnp.zeros_like, parameters) for _ in range(2))
    show(0, "compiling")
    traced = step.trace(parameters, first, second, 0, pairs(excerpts[0]))
    compiled = traced.lower().compile()
    losses = []
    for done, tokens in enumerate(excerpts):
        parameters, first, second, value = compiled(parameters, first, second, done, pairs(tokens))
        losses.append(float(value))
        show(done + 1, f"loss {np.mean(losses[-50:]):.3f}")
    return Training(np.array(losses), parameters, traced.jaxpr, compiled.as_text())


def mean_loss(model: Model, operations: Operations, dtype: Any, parameters: Parameters, tokens: Array) -> Array:
    """The mean loss of excerpts [batch, length + 1], in nats per token."""
    return _loss(model, operations, dtype, parameters, tokens[:, :-1], tokens[:, 1:])


def _loss(
    model: Model, operations: Operations, dtype: Any, parameters: Parameters, tokens: Array, targets: Array,
    positions: Any = None,
) -> Array:  # fmt: skip
    """The mean loss in nats per token of tokens [batch, length], at positions, whose next tokens are `targets`."""
    return cross_entropy(logits(model, operations, parameters, tokens, dtype, positions=positions)[0], targets)


def adam(parameters, gradients, first, second, t, rate) -> tuple[Parameters, Parameters, Parameters]:
    """The parameters and both moments after step t = 1, 2, ….

    m = β₁ m + (1 − β₁) g,    v = β₂ v + (1 − β₂) g²,    w = w − rate · m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + ε)
    """
    average = lambda decay: lambda old, new: decay * old + (1 - decay) * new
    first = jax.tree.map(average(_DECAY[0]), first, gradients)
    second = jax.tree.map(average(_DECAY[1]), second, jax.tree.map(jnp.square, gradients))
    unbias = tuple(1 - decay**t for decay in _DECAY)
    moved = lambda w, m, v: w - rate * (m / unbias[0]) / (jnp.sqrt(v / unbias[1]) + 1e-8)
    return jax.tree.map(moved, parameters, first, second), first, second
