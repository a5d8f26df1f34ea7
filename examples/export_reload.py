"""Export a layer with its gradient for CPU, CUDA and TPU in one artifact, on any machine, and run it elsewhere."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import ejkernel

PLATFORMS = ("cpu", "cuda", "tpu")


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    """Attention with four heads over x [batch, length, 256], and a residual connection."""
    q, k, v = (x @ w).reshape(*x.shape[:2], 3, 4, 64).transpose(2, 0, 1, 3, 4)
    return x + ejkernel.lax.flash_attention(q, k, v, causal=True).reshape(x.shape)


def main() -> None:
    w = jax.random.normal(jax.random.key(0), (256, 3 * 256)) / 16
    x = jax.random.normal(jax.random.key(1), (2, 256, 256))
    checks = ejkernel.export_checks()  # kernels are custom calls that jax.export gives no guarantees for
    exported = export.export(jax.jit(layer), platforms=PLATFORMS, disabled_checks=checks)(w, x)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "layer.bin")
        file.write_bytes(exported.serialize(vjp_order=1))
        size = file.stat().st_size
        loaded = export.deserialize(bytearray(file.read_bytes()))

    np.testing.assert_allclose(loaded.call(w, x), layer(w, x), rtol=1e-5, atol=1e-5)
    ours, right = (jax.vjp(f, w, x)[1](x) for f in (loaded.call, layer))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), ours, right)

    # With symbolic sizes one artifact serves every length; XLA computes there, as kernels are made for known sizes.
    any_length = jax.ShapeDtypeStruct(export.symbolic_shape("2, length, 256"), jnp.float32)
    of_any_length = export.export(jax.jit(layer), disabled_checks=checks)(w, any_length)
    np.testing.assert_allclose(of_any_length.call(w, x[:, :100]), layer(w, x[:, :100]), rtol=1e-4, atol=1e-4)
    print(f"{', '.join(loaded.platforms)}: {size // 1024} KiB with the gradient")


if __name__ == "__main__":
    main()
