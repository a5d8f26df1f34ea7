"""What a step on a GPU is made of, as far as XLA is told before it compiles."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._target import lowering_for
from ejkernel.serving import Decoder, random_weights
from ejkernel.serving.program import Sizes, empty_caches, forward
from ejkernel.types import Target

pytest.importorskip("jax_triton")

LAYERS = 3
DECODER = Decoder(256, 128, 4, 2, 64, 256, (None,) * LAYERS, tied=True)


def test_a_decode_has_four_products_a_layer_and_no_loop():
    """Those of q, k and v are one, and those of gate and up; which slot a token has is found without a loop."""
    sizes = Sizes(tokens=8, rows=8, slots=8, pages=4)
    last, flat = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (8, sizes.total))
    weights = jax.eval_shape(lambda: random_weights(DECODER, jax.random.key(0), jnp.bfloat16))
    caches = jax.eval_shape(lambda: empty_caches(DECODER, 32, 16, jnp.bfloat16, None))

    def step(weights, caches, last, flat):
        return forward(DECODER, weights, caches, last, sizes.inputs_in(flat), trees=False)

    with lowering_for(Target("cuda", "NVIDIA H200")):
        text = jax.jit(step).trace(weights, caches, last, flat).lower(lowering_platforms=("cuda",)).as_text()
    count = lambda name: text.count(f"stablehlo.{name}")
    assert (count("dot_general"), count("while")) == (4 * LAYERS + 1, 0)
