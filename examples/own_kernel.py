"""A kernel of one's own: relu(x)² · gate, in plain JAX and in Pallas for TPU, with configs, a gradient and a label."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ejkernel.ops import Kernel, find_labels_in_lowered


@dataclass(frozen=True)
class Config:
    """How many rows a program computes."""

    rows: int = 128


def formula(x: jax.Array, gate: jax.Array) -> jax.Array:
    return jnp.square(jnp.maximum(x, 0)) * gate


class SquaredReluGate(Kernel[Config, jax.Array]):
    """relu(x)² · gate of two arrays [rows, features]."""

    def __init__(self):
        super().__init__(name="squared_relu_gate")

    def run(self, x, gate, *, cfg):
        return formula(x, gate)

    def run_pallas(self, x, gate, *, cfg):
        block = pl.BlockSpec((min(cfg.rows, x.shape[0]), x.shape[1]), lambda i: (i, 0))

        def kernel(x, gate, o):
            o[...] = formula(x[...], gate[...])

        return pl.pallas_call(
            kernel,
            grid=pl.cdiv(x.shape[0], block.block_shape[0]),
            in_specs=[block, block],
            out_specs=block,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        )(x, gate)

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        (x, gate), (do,) = primals, cotangents
        positive = jnp.maximum(x, 0)
        return 2 * positive * gate * do, positive**2 * do

    def heuristic_cfg(self, inv):
        return Config()

    def config_space(self, inv):
        return [Config(rows) for rows in (128, 256, 512)]


def main() -> None:
    gate_of = SquaredReluGate()
    x, gate = jax.random.normal(jax.random.key(0), (2, 1024, 256))
    np.testing.assert_allclose(gate_of(x, gate), formula(x, gate), rtol=1e-6)
    ours, right = (jax.jit(jax.vjp(f, x, gate)[1])(x) for f in (gate_of, formula))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, right)
    np.testing.assert_allclose(jax.vmap(gate_of)(x[None], gate[None])[0], formula(x, gate), rtol=1e-6)
    lowered = jax.jit(gate_of).trace(x, gate).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()
    print(jax.make_jaxpr(gate_of)(x, gate).eqns[0].params["config"], find_labels_in_lowered(lowered))


if __name__ == "__main__":
    main()
