"""Operands and results of kernels that are slices of flat arrays, at places that are aligned to elements alone."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import lax

from .device import ON_HOPPER

pytestmark = pytest.mark.gpu
SHAPE = (1, 512, 1, 64)
SIZE = math.prod(SHAPE)


@pytest.mark.parametrize("platform", ["triton", pytest.param("pallas", marks=ON_HOPPER)])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_flash_attention_of_slices_into_a_slice(platform, first):
    flat = jax.random.normal(jax.random.key(0), (first + 3 * SIZE,), jnp.bfloat16)
    attention = partial(lax.flash_attention, platform=platform)

    def parts(flat):
        return [flat[i : i + SIZE].reshape(SHAPE) for i in range(first, first + 3 * SIZE, SIZE)]

    in_place = jax.jit(lambda flat: flat.at[first : first + SIZE].set(attention(*parts(flat)).reshape(-1)))
    np.testing.assert_array_equal(parts(in_place(flat))[0], jax.jit(attention)(*parts(flat)))
