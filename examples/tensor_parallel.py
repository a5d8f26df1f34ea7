"""Tensor parallelism over two devices: heads and hidden features are split, and each half ends in one all-reduce.

Run it anywhere with XLA_FLAGS=--xla_force_host_platform_device_count=2 JAX_PLATFORMS=cpu.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel

BATCH, LENGTH, FEATURES, HEADS, KV_HEADS, HEAD_DIM = 2, 128, 64, 4, 2, 16
SHAPES = {
    "q": ((FEATURES, HEADS, HEAD_DIM), P(None, "model")),
    "k": ((FEATURES, KV_HEADS, HEAD_DIM), P(None, "model")),
    "v": ((FEATURES, KV_HEADS, HEAD_DIM), P(None, "model")),
    "out": ((HEADS, HEAD_DIM, FEATURES), P("model")),
    "up": ((FEATURES, 4 * FEATURES), P(None, "model")),
    "down": ((4 * FEATURES, FEATURES), P("model")),
}


def layer(w: dict[str, jax.Array], x: jax.Array, whole: NamedSharding | None = None) -> jax.Array:
    """A transformer layer without norms; what is summed over split axes is `whole` afterwards."""
    q, k, v = (jnp.einsum("bsf,fhd->bshd", x, w[name]) for name in "qkv")
    o = ejkernel.lax.flash_attention(q, k, v, causal=True)
    x = x + jnp.einsum("bshd,hdf->bsf", o, w["out"], out_sharding=whole)
    hidden = jax.nn.gelu(x @ w["up"])
    return x + jnp.einsum("bsh,hf->bsf", hidden, w["down"], out_sharding=whole)


def main() -> None:
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    pairs = zip(keys, SHAPES.items(), strict=True)
    w = {name: jax.random.normal(key, shape) / FEATURES**0.5 for key, (name, (shape, _)) in pairs}
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, FEATURES))
    alone = layer(w, x)
    gradients = jax.grad(lambda w: (layer(w, x) ** 2).sum())(w)

    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        whole = NamedSharding(mesh, P())
        split = {name: jax.device_put(a, NamedSharding(mesh, SHAPES[name][1])) for name, a in w.items()}
        x = jax.device_put(x, whole)
        compiled = jax.jit(layer, static_argnums=2).lower(split, x, whole).compile()
        o = compiled(split, x)
        found = jax.jit(jax.grad(lambda w, x: (layer(w, x, whole) ** 2).sum()))(split, x)

    np.testing.assert_allclose(o, alone, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-2), found, gradients)
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    print("collectives:", re.findall(rf" ({kinds})(?:-start)?\(", compiled.as_text()))


if __name__ == "__main__":
    main()
