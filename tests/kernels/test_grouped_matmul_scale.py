"""The cotangent of the scales of grouped_matmul, from matrix products of 16-bit numbers."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._grouped_matmul import scale_cotangent
from ejkernel.primitives.grouped_matmul import Operands


@pytest.mark.parametrize("size", (1.0, 1e-6, 1e-12, 1e12))
@pytest.mark.parametrize("of_do", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16, jnp.float32))
def test_it_has_the_bits_of_the_cotangent(dtype, of_do, size):
    """dσ_n = Σ_k rhs_kn Σ_i lhs_ik do_in of one group, with all terms positive: nothing cancels. In float16, 1e-6 is
    subnormal, 1e-12 is 0 and 1e12 infinite. Some of do is far below the rest, and what is in no group far above.
    """
    rng = np.random.default_rng(0)
    positive = lambda *shape: jnp.asarray(rng.uniform(1, 2, shape), dtype)
    lhs, rhs, do = (
        positive(1, 5, 16),
        positive(1, 1, 16, 8),
        jnp.asarray(rng.uniform(size, 2 * size, (1, 5, 8)), of_do).at[0, :, 0].multiply(1e-6).at[0, 4].set(1e30),
    )
    x = Operands(lhs, rhs, jnp.array([[4]], jnp.int32), rhs_scale=jnp.ones((1, 1, 8), jnp.float32))

    def matrices(do):
        assert do.dtype == dtype
        product = partial(jnp.einsum, "bmk,bmn->bkn", preferred_element_type=jnp.float32, precision="highest")
        return product(lhs[:, :4], do[:, :4])[:, None]

    exact = np.einsum("bekn,bmk,bmn->ben", *(np.asarray(a, np.float64) for a in (rhs, lhs[:, :4], do[:, :4])))
    np.testing.assert_allclose(scale_cotangent(x, do, matrices), exact, rtol=1e-6)
