"""ragged_gated_delta_rule in Triton on a GPU, beside the formula in float64; the pool is updated in its place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._triton.ragged_gated_delta_rule import configs, ragged_gated_delta_rule
from ejkernel.primitives.ragged_gated_delta_rule import Operands
from tests.kernels import ragged_states

pytestmark = pytest.mark.gpu
TOLERANCE = {"float32": 5e-5, "bfloat16": 4e-2, "float16": 5e-3}
LONG = (0, 1, 700, 701, 702, 1500, 1533, 1533, 1600)
CALLS = ragged_states.CALLS | {
    "heads of 128": dict(cuts=LONG, h=8, g=4, d=128, e=128),
    "64 and 256 features, decode": dict(cuts=tuple(range(12)), h=4, g=2, d=64, e=256),
    "8 features": dict(cuts=LONG, d=8, e=8),
}


def step(x: Operands, spec, **options):
    tokens = (None if a is None else a[0] for a in (x.q, x.k, x.v, x.beta, x.g, x.states, *x[5:7]))
    how = dict(softmax_scale=spec.softmax_scale, use_qk_l2norm=spec.use_qk_l2norm)
    return ejkernel.lax.ragged_gated_delta_rule(*tokens, **how, **options)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results(call, dtype):
    x, spec = ragged_states.operands(dtype, **call)
    found = jax.jit(
        lambda x: ragged_gated_delta_rule(*x, spec=spec, config=configs.space("", x, spec, gpu_target())[0])
    )
    ragged_states.check(*found(x), x, spec, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_config(dtype):
    x, spec = ragged_states.operands(dtype, cuts=LONG, h=8, g=4, d=128, e=128)
    candidates = configs.space("ragged_gated_delta_rule", x, spec, gpu_target())
    assert len(candidates) > 1
    for config in candidates:
        o, states = step(x, spec, config=config)
        ragged_states.check(o[None], states[None], x, spec, TOLERANCE[dtype])


def test_the_choice_and_vmap():
    calls = [ragged_states.operands("bfloat16", cuts=LONG, h=4, g=2, d=64, e=64, seed=seed) for seed in range(3)]
    spec, xs = calls[0][1], [x for x, _ in calls]
    together = jax.tree.map(lambda *a: jnp.stack(a), *xs)
    f = jax.jit(jax.vmap(lambda x: step(x, spec)))
    assert "triton_kernel_call" in f.lower(together).as_text()
    o, states = f(together)
    for n, x in enumerate(xs):
        ragged_states.check(o[n][None], states[n][None], x, spec, TOLERANCE["bfloat16"])
    np.testing.assert_array_equal(f(together)[1], states)


def test_a_scan_of_steps_in_the_place_of_a_donated_pool():
    """The final state of steps one after the other is that of one long sequence, and other states keep their bits."""
    x, spec = ragged_states.operands("float32", cuts=tuple(range(9)), h=4, g=2, d=64, e=64)
    pool = jnp.nan_to_num(x.states, nan=7.0)

    def steps(pool, tokens):
        def run(pool, _):
            o, states = step(tokens._replace(states=pool), spec)
            return states[None], o

        return jax.lax.scan(run, pool, None, 5)

    program = jax.jit(steps, donate_argnums=0).lower(pool, x).compile()
    assert program.memory_analysis().temp_size_in_bytes < pool.nbytes // 2
    by_xla = pool
    for _ in range(5):
        o, states = step(x._replace(states=by_xla), spec, config={"platform": "xla"})
        by_xla = states[None]
    found, outputs = program(jnp.array(pool), x)
    np.testing.assert_allclose(found, by_xla, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(outputs[-1], o, atol=1e-4, rtol=1e-4)
    others = np.setdiff1d(np.arange(pool.shape[1]), x.state_indices)
    np.testing.assert_array_equal(found[:, others], 7.0)
