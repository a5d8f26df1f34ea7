"""MeanFlow (arXiv 2505.13447) with attention: its loss holds a jvp of the network, and its gradient goes through that.

The network predicts the average velocity u(z, r, t) from r to t. With v = noise − data it has to fulfil
u = v − (t − r) du/dt, where du/dt = ∂u/∂z · v + ∂u/∂t is a jvp, which the tangent kernel of the attention computes.
"""

import jax
import jax.numpy as jnp
import optax

import ejkernel

BATCH, LENGTH, FEATURES, HEADS = 16, 16, 32, 2


def parameters(key: jax.Array) -> dict[str, jax.Array]:
    """Of one layer of attention with an MLP, and of the embedding of both times."""
    sizes = {"qkv": (FEATURES, 3 * FEATURES), "out": (FEATURES, FEATURES), "time": (2, FEATURES)}
    sizes |= {"up": (FEATURES, 4 * FEATURES), "down": (4 * FEATURES, FEATURES)}
    keys = jax.random.split(key, len(sizes))
    return {n: jax.random.normal(k, s) * s[0] ** -0.5 for k, (n, s) in zip(keys, sizes.items(), strict=True)}


def network(p: dict[str, jax.Array], z: jax.Array, r: jax.Array, t: jax.Array) -> jax.Array:
    """u(z, r, t) [batch, length, features]; every token sees every other."""
    x = z + (jnp.stack([r, t], -1) @ p["time"])[:, None]
    q, k, v = (x @ p["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1).transpose(2, 0, 1, 3, 4)
    x = x + ejkernel.lax.flash_attention(q, k, v).reshape(x.shape) @ p["out"]
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def loss(p: dict[str, jax.Array], key: jax.Array, data: jax.Array) -> jax.Array:
    times, noise = jax.random.split(key)
    r, t = jnp.sort(jax.random.uniform(times, (2, BATCH)), axis=0)
    noise = jax.random.normal(noise, data.shape)
    z = (1 - t[:, None, None]) * data + t[:, None, None] * noise
    velocity = noise - data
    u, dudt = jax.jvp(lambda z, r, t: network(p, z, r, t), (z, r, t), (velocity, jnp.zeros(BATCH), jnp.ones(BATCH)))
    target = velocity - (t - r)[:, None, None] * dudt
    return ((u - jax.lax.stop_gradient(target)) ** 2).mean()


def main() -> None:
    p, optimizer = parameters(jax.random.key(0)), optax.adam(3e-3)
    state = optimizer.init(p)
    data = 1 + 0.1 * jax.random.normal(jax.random.key(1), (BATCH, LENGTH, FEATURES))

    @jax.jit
    def step(p, state, key):
        value, gradients = jax.value_and_grad(loss)(p, key, data)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(p, updates), state, value

    losses = []
    for key in jax.random.split(jax.random.key(2), 60):
        p, state, value = step(p, state, key)
        losses.append(float(value))
    noise = jax.random.normal(jax.random.key(3), data.shape)
    sample = noise - network(p, noise, jnp.zeros(BATCH), jnp.ones(BATCH))  # one step from noise to data
    print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}; mean of the samples {float(sample.mean()):.2f}, of the data 1.00")
    assert losses[-1] < 0.5 * losses[0]


if __name__ == "__main__":
    main()
