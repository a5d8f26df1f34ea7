"""A transformer layer in flax nnx with flash_attention: grouped heads, a sliding window, checkpoint, training."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import ejkernel

BATCH, LENGTH, FEATURES, HEADS, KV_HEADS, HEAD_DIM = 4, 128, 64, 4, 2, 16


class Attention(nnx.Module):
    """Causal attention over a window of 64 tokens."""

    def __init__(self, rngs: nnx.Rngs):
        project = lambda heads: nnx.LinearGeneral(FEATURES, (heads, HEAD_DIM), use_bias=False, rngs=rngs)
        self.q, self.k, self.v = project(HEADS), project(KV_HEADS), project(KV_HEADS)
        self.out = nnx.LinearGeneral((HEADS, HEAD_DIM), FEATURES, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(ejkernel.lax.flash_attention(self.q(x), self.k(x), self.v(x), causal=True, window=64))


class Layer(nnx.Module):
    """Attention and an MLP, each after a normalisation and beside a residual connection."""

    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.RMSNorm(FEATURES, rngs=rngs) for _ in range(2)])
        self.attention = Attention(rngs)
        self.up = nnx.Linear(FEATURES, 4 * FEATURES, rngs=rngs)
        self.down = nnx.Linear(4 * FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


@nnx.jit
def step(layer: Layer, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    """One step of training; of the layer only what the kernels computed is kept for the backward."""

    def loss(layer):
        graph, state = nnx.split(layer)
        run = lambda state, x: nnx.merge(graph, state)(x)
        run = jax.checkpoint(run, policy=ejkernel.checkpoint_policies.save_kernels)
        return ((run(state, x) - y) ** 2).mean()

    value, gradients = nnx.value_and_grad(loss)(layer)
    optimizer.update(layer, gradients)
    return value


def main() -> None:
    layer = Layer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, FEATURES))
    y = jnp.roll(x, 1, axis=1)  # the token before each
    losses = [float(step(layer, optimizer, x, y)) for _ in range(10)]
    print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
    assert losses[-1] < 0.7 * losses[0]


if __name__ == "__main__":
    main()
