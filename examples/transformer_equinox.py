"""A transformer layer in equinox with flash_attention, for one sequence: vmap makes the batch of it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import ejkernel

BATCH, LENGTH, FEATURES, HEADS, HEAD_DIM = 4, 128, 64, 4, 16


class Attention(eqx.Module):
    """Causal attention with a learned attention sink for each head."""

    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    sinks: jax.Array

    def __init__(self, key: jax.Array):
        qkv, out = jax.random.split(key)
        self.qkv = eqx.nn.Linear(FEATURES, 3 * HEADS * HEAD_DIM, use_bias=False, key=qkv)
        self.out = eqx.nn.Linear(HEADS * HEAD_DIM, FEATURES, use_bias=False, key=out)
        self.sinks = jnp.zeros(HEADS)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jax.vmap(self.qkv)(x).reshape(1, LENGTH, 3, HEADS, HEAD_DIM).transpose(2, 0, 1, 3, 4)
        o = ejkernel.lax.flash_attention(q, k, v, sinks=self.sinks, causal=True)
        return jax.vmap(self.out)(o.reshape(LENGTH, -1))


class Layer(eqx.Module):
    """Attention and an MLP, each after a normalisation and beside a residual connection."""

    norms: list[eqx.nn.RMSNorm]
    attention: Attention
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        attention, mlp = jax.random.split(key)
        self.norms = [eqx.nn.RMSNorm(FEATURES) for _ in range(2)]
        self.attention = Attention(attention)
        self.mlp = eqx.nn.MLP(FEATURES, FEATURES, 4 * FEATURES, 1, jax.nn.gelu, key=mlp)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(jax.vmap(self.norms[0])(x))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


@eqx.filter_value_and_grad
def loss(layer: Layer, x: jax.Array, y: jax.Array) -> jax.Array:
    return ((jax.vmap(layer)(x) - y) ** 2).mean()


def main() -> None:
    layer, optimizer = Layer(jax.random.key(0)), optax.adam(1e-2)
    state = optimizer.init(eqx.filter(layer, eqx.is_array))

    @eqx.filter_jit
    def step(layer, state, x, y):
        value, gradients = loss(layer, x, y)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(layer, updates), state, value

    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, FEATURES))
    y, losses = jnp.roll(x, 1, axis=1), []
    for _ in range(10):
        layer, state, value = step(layer, state, x, y)
        losses.append(float(value))
    print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
    assert losses[-1] < 0.7 * losses[0]


if __name__ == "__main__":
    main()
