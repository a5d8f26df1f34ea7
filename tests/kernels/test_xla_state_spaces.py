"""State spaces and the gated delta rule in XLA: what the generated tests of transforms do not cover."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import lax
from ejkernel.kernels._xla import state_space_v1 as loops

FLOATS = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def delta_rule(length):
    x = FLOATS((1, length, 4, 64))
    return partial(lax.gated_delta_rule, use_qk_l2norm=True), [x, x, x, *[FLOATS((1, length, 4))] * 2], 4 * 64 * 64


def mamba(length):
    x, B = FLOATS((1, length, 256)), FLOATS((1, length, 16))
    return lax.state_space_v1, [x, FLOATS((256, 16)), B, B, FLOATS((256,)), x], 256 * 16


def mamba_2(length):
    x, B, A = FLOATS((1, length, 4, 64)), FLOATS((1, length, 1, 64)), FLOATS((4,))
    return lax.state_space_v2, [x, A, B, B, A, FLOATS((1, length, 4))], 4 * 64 * 64


def memory(of, length, mode):
    """Bytes besides arguments and results, and the size of the states of all tokens."""
    f, operands, state = of(length)
    loss = lambda *x: (f(*x) ** 2).sum()
    program = f if mode == "forward" else jax.grad(loss, tuple(range(len(operands))))
    return jax.jit(program).lower(*operands).compile().memory_analysis().temp_size_in_bytes, length * state * 4


@pytest.mark.parametrize("mode", ["forward", "gradient"])
@pytest.mark.parametrize("of", [delta_rule, mamba, mamba_2])
def test_memory_is_linear_in_the_length(of, mode):
    short, longer, longest = (memory(of, n * 1024, mode)[0] for n in (1, 2, 4))
    assert longer < 2.1 * short and longest < 2.1 * longer


@pytest.mark.parametrize("mode", ["forward", "gradient"])
@pytest.mark.parametrize("of", [delta_rule, mamba, mamba_2])
def test_the_states_of_all_tokens_are_never_in_memory_at_once(of, mode):
    found, of_states = memory(of, 4096, mode)
    assert found < of_states / 2


@pytest.mark.parametrize("of", [delta_rule, mamba, mamba_2])
def test_a_single_token_replaces_the_state_without_another_one(of):
    """States are neither transposed nor computed twice."""
    f, operands, numbers = of(1)
    shape = (1, *operands[0].shape[2:], numbers // math.prod(operands[0].shape[2:]))
    step = partial(f, return_state=True)
    compiled = jax.jit(lambda state, *x: step(*x, initial_state=state)).lower(FLOATS(shape), *operands).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < numbers * 4


def test_states_of_sequences_of_one_token_are_replaced_in_place():
    """Besides the pool, the step has the state of only one sequence in memory at a time."""
    sequences, state = 16, (4, 64, 64)
    x, of_heads = FLOATS((sequences, 4, 64)), FLOATS((sequences, 4))
    tables = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (sequences + 1, sequences))
    step = jax.jit(lax.ragged_gated_delta_rule, donate_argnums=5)
    compiled = step.lower(x, x, x, of_heads, of_heads, FLOATS((sequences, *state)), *tables).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * math.prod(state) * 4


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("features", [1, 5, 16])
def test_the_gradient_of_the_loop_is_the_one_that_jax_finds(batch, features):
    """With features in halves, also for an odd number of them; A for each batch index, and one for all."""
    rng = np.random.default_rng(0)
    of = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    c, h = 6, 7
    u, dt, B, C = of(c, batch, h), abs(of(c, batch, h)), of(c, batch, features), of(c, batch, features)
    state, weights = of(batch, features, h), (of(batch, features, h), of(c, batch, h))
    for A in (-abs(of(1, features, h)), -abs(of(batch, features, h))):
        loss = lambda f: lambda *x: sum((o * w).sum() for o, w in zip(f(*x), weights, strict=True))
        gradients = [
            jax.grad(loss(f), tuple(range(6)))(A, state, u, dt, B, C) for f in (loops._differentiated_loop, loops._loop)
        ]
        for ours, wanted in zip(*gradients, strict=True):
            np.testing.assert_allclose(ours, wanted, atol=2e-5 * float(abs(wanted).max()))
