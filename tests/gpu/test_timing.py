"""The clock of the tuner on a GPU, which profiles calls that are too short to be timed from the host."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops.utils import timing

pytestmark = pytest.mark.gpu


def test_it_runs_after_a_profile(tmp_path):
    """Of JAX's profiler, which drops what comes when it has ended: the clock would end the process for that."""
    x = jnp.ones(1000)
    call = jax.jit(lambda x: x + 1).lower(x).compile()
    for n in range(2):
        with jax.profiler.trace(tmp_path / str(n)):
            jax.block_until_ready([call(x) for _ in range(1000)])
        assert 0 < timing._milliseconds_of_kernels(partial(call, x)) < 1
