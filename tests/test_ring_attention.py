"""Attention over a sequence that is sharded over devices is that over the whole sequence, through every transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel import lax


def ringed(size, layout, **options):
    """(arrays of the whole sequence) → o and lse of the whole sequence, by a ring of that many devices."""
    mesh = jax.make_mesh((size,), ("x",), devices=jax.devices()[:size], axis_types=(AxisType.Auto,))

    def run(x):
        order, inverse = lax.ring_order(x["q"].shape[1], size, layout)
        call = lambda x: lax.ring_attention(**x, axis_name="x", layout=layout, return_lse=True, **options)
        results = P(None, "x"), P(None, None, "x")
        local = jax.shard_map(call, mesh=mesh, in_specs=P(None, "x"), out_specs=results)
        o, lse = local({name: a[:, order] for name, a in x.items()})
        return o[:, inverse], lse[:, :, inverse]

    return run


def loss(f):
    return lambda x: sum(jnp.sin(y * 3).sum() for y in f(x))


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("layout", ("contiguous", "striped", "zigzag"))
def test_it_is_flash_attention_of_the_whole(size, layout):
    rng, shapes = np.random.default_rng(0), dict(q=(2, 12, 4, 8), k=(2, 12, 2, 8), v=(2, 12, 2, 6))
    x = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    f, g = ringed(size, layout, causal=True), lambda x: lax.flash_attention(**x, causal=True, return_lse=True)
    assert_close(jax.jit(f)(x), g(x))
    assert_close(jax.jit(jax.grad(loss(f)))(x), jax.grad(loss(g))(x), tolerance=1e-5)
