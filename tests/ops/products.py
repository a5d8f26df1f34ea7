"""A user's kernel with three results and one option, and the plain function that it computes."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import ConfigSelectorChain, Executor, Kernel


@dataclass(frozen=True)
class Config:
    block: int = 1


def plain(a, b, index=0, *, scale=1.0):
    return {"product": jnp.sin(a) @ b * scale, "rows": a.sum(1), "index": jnp.asarray(index) + 1}


class Product(Kernel[Config, dict]):
    """Two differentiable results and one that is not, a static option, an integer operand."""

    def __init__(self):
        super().__init__(name="product")

    def run(self, a, b, index=0, *, cfg, scale=1.0):
        return plain(a, b, index, scale=scale)

    def heuristic_cfg(self, inv):
        return Config()


executor = Executor(ConfigSelectorChain(autotune=False))
A = np.random.default_rng(0).standard_normal((3, 4)).astype("float32")
B = np.random.default_rng(1).standard_normal((4, 5)).astype("float32")


def same(ours, right, rtol=1e-5):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=1e-5), ours, right)


def ours(kernel, **options):
    return lambda *args: executor(kernel, *args, **options)
