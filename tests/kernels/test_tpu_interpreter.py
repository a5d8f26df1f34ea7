"""The interpreter of TPU kernels detects the errors that tests rely on it to detect."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .tpu_interpreter import interpreted


def copied(x, *, early):
    """x by way of a copy that is read before it has arrived, or after."""

    def kernel(x, o, arrived, done):
        copy = pltpu.make_async_copy(x, arrived, done)
        copy.start()
        if early:
            o[...] = arrived[...]
        copy.wait()
        if not early:
            o[...] = arrived[...]

    return pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
    )(x)


def test_a_race_is_an_error():
    x = jnp.ones((8, 128))
    assert (interpreted(lambda x: copied(x, early=False))(x) == x).all()
    with pytest.raises(AssertionError, match="RACE"):
        interpreted(lambda x: copied(x, early=True))(x)
