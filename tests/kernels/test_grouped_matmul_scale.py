"""The cotangent of the scales of grouped_matmul, from matrix products of 16-bit numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._grouped_matmul import scale_cotangent
from ejkernel.primitives.grouped_matmul import Operands


@pytest.mark.parametrize("size", (1.0, 1e-6))
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16, jnp.float32))
def test_it_has_the_bits_of_a_float32_cotangent(dtype, size):
    """dσ_n = Σ_k rhs_kn Σ_i lhs_ik do_in of one group, with all terms positive: nothing cancels. Of float16, 1e-6 is
    subnormal.
    """
    rng = np.random.default_rng(0)
    positive = lambda *shape: jnp.asarray(rng.uniform(1, 2, shape), dtype)
    lhs, rhs, do = (
        positive(1, 5, 16),
        positive(1, 1, 16, 8),
        jnp.asarray(rng.uniform(size, 2 * size, (1, 5, 8)), jnp.float32),
    )
    x = Operands(lhs, rhs, jnp.array([[5]], jnp.int32), rhs_scale=jnp.ones((1, 1, 8), jnp.float32))

    def matrices(do):
        assert do.dtype == dtype
        return jnp.einsum("bmk,bmn->bkn", lhs, do, preferred_element_type=jnp.float32, precision="highest")[:, None]

    exact = np.einsum("bekn,bmk,bmn->ben", *(np.asarray(a, np.float64) for a in (rhs, lhs, do)))
    np.testing.assert_allclose(scale_cotangent(x, do, matrices), exact, rtol=1e-6)
