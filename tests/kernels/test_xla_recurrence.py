"""The linear recurrence in XLA: what the generated tests of transforms do not cover."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel
from ejkernel.kernels._xla._recurrence import recurrence, recurrence_bwd, recurrence_jvp, reference
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def tokens(b=2, s=40, h=4, g=2, d=8, e=6):
    return normal(b, s, h, d, seed=1), normal(b, s, g, d, seed=2), normal(b, s, g, e, seed=3)


def near(found, wanted, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(jnp.abs(b).max()))


def test_a_token_at_a_time_is_the_whole():
    q, k, v = tokens()
    gk, state = -jnp.abs(normal(*q.shape)), normal(2, 4, 8, 6)
    wanted = ejkernel.lax.gla(q, k, v, gk, state, return_state=True)
    outs = []
    for t in range(q.shape[1]):
        at = lambda x, t=t: x[:, t : t + 1]
        o, state = ejkernel.lax.gla(at(q), at(k), at(v), at(gk), state, return_state=True)
        outs.append(o)
    near((jnp.concatenate(outs, axis=1), state), wanted)


def test_one_token_without_a_state():
    """scale · (q·k) v."""
    q, k, v = tokens(s=1)
    wanted = jnp.einsum("bshd,bshd,bshe->bshe", q, *(jnp.repeat(x, 2, axis=2) for x in (k, v))) * 8**-0.5
    near(ejkernel.lax.lightning_attention(q, k, v, layer_idx=0, num_layers=2), wanted)


def test_decays_are_those_of_layer_and_head():
    q, k, v = tokens()
    slopes = -jnp.array([0.0, 1.0, 2.0, 3.0]) * (8 / 4) * (1 - 1 / 5)
    wanted = ejkernel.lax.recurrent(q, k, v, g_gamma=slopes)
    near(ejkernel.lax.lightning_attention(q, k, v, layer_idx=1, num_layers=5), wanted)


def test_decays_of_float64_arrays_are_float64():
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(np.asarray(x), jnp.float64) for x in tokens(h=6, g=6))
        wanted = ejkernel.lax.recurrent(q, k, v, g_gamma=-8 / 6 * (1 - 2 / 7) * jnp.arange(6.0))
        near(ejkernel.lax.lightning_attention(q, k, v, layer_idx=2, num_layers=7), wanted, 1e-13)


def test_a_traced_scale_has_a_gradient():
    q, k, v = tokens()
    of = lambda scale: ejkernel.lax.recurrent(q, k, v, softmax_scale=scale).sum()
    near(jax.grad(of)(jnp.float32(0.3)), of(jnp.float32(1.0)), 1e-4)


@pytest.mark.parametrize("reverse", (False, True))
def test_packed_sequences_are_independent(reverse):
    """Each as if it were alone; tokens past the last may be NaN, and an empty sequence passes its state on."""
    (q, k, v), g, states = tokens(b=1), -jnp.abs(normal(1, 40, 4)), normal(4, 4, 8, 6)
    ends = (0, 17, 17, 18, 33)
    poisoned = (x.at[:, ends[-1] :].set(jnp.nan) for x in (q, k, v, g))
    call = partial(ejkernel.lax.recurrent, reverse=reverse, return_state=True)
    f = jax.jit(lambda q, k, v, g, ends: call(q, k, v, g, initial_state=states, cu_seqlens=ends))
    o, final = f(*poisoned, jnp.array(ends))
    assert not o[:, ends[-1] :].any()
    np.testing.assert_array_equal(final[1], states[1])
    for n, (first, after) in enumerate(itertools.pairwise(ends)):
        if first < after:
            alone = (x[:, first:after] for x in (q, k, v, g))
            near((o[:, first:after], final[n : n + 1]), call(*alone, initial_state=states[n : n + 1]))


def test_sequences_end_with_the_tokens():
    """Entries of cu_seqlens beyond the tokens are clamped."""
    q, k, v = tokens(b=1)
    call = lambda *ends: ejkernel.lax.recurrent(q, k, v, cu_seqlens=jnp.array(ends), return_state=True)
    near(call(-3, 17, 90, 200), call(0, 17, 40, 40), 0)


@pytest.mark.parametrize("packed", (False, True))
def test_no_tokens_leave_the_states_as_they_are(packed):
    """The gradient with respect to the states is then that of the identity; constant decays have none."""
    (q, k, v), state = tokens(b=1, s=0), normal(3 if packed else 1, 4, 8, 6)
    ends = jnp.zeros(4, jnp.int32) if packed else None

    def call(state, g_gamma):
        return ejkernel.lax.recurrent(q, k, v, g_gamma=g_gamma, initial_state=state, cu_seqlens=ends, return_state=True)

    o, final = call(state, jnp.ones(4))
    assert o.shape == (1, 0, 4, 6)
    np.testing.assert_array_equal(final, state)
    gradients = jax.grad(lambda *x: (call(*x)[1] * state).sum(), (0, 1))(state, jnp.ones(4))
    near(gradients, (state, jnp.zeros(4)))


def test_a_batch_of_none():
    (q, k, v), gamma = tokens(b=0), -jnp.ones(4)
    call = partial(ejkernel.lax.recurrent, return_state=True)
    assert [x.shape for x in call(q, k, v, g_gamma=gamma)] == [(0, 40, 4, 6), (0, 4, 8, 6)]
    assert not jax.grad(lambda gamma: call(q, k, v, g_gamma=gamma)[0].sum())(gamma).any()


def test_decays_that_are_too_fast_for_a_quotient():
    """exp(P_i) / exp(P_j) would be 0 / 0 after nine tokens of such a gate."""
    q, k, v = tokens(s=64)
    gk = jnp.full(q.shape, -10.0).at[:, ::7].set(0.0)
    operands = Operands(q, k, v, gk=gk)
    near(recurrence(*operands, spec=RecurrenceSpec()), reference(*operands, spec=RecurrenceSpec()))


def test_heads_over_a_mesh_decay_as_in_the_whole():
    q, k, v = tokens()
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    over = P(None, None, "x")
    call = partial(ejkernel.modules.lightning_attention, layer_idx=0, num_layers=2)
    near(call(q, k, v, mesh=mesh, in_specs=(over,) * 3, out_specs=over), call(q, k, v))


# --- Memory -----------------------------------------------------------------------------------------------------------


def of_size(length, heads=2, features=32):
    x = jax.ShapeDtypeStruct((1, length, heads, features), jnp.float32)
    return Operands(x, x, x, gk=x)


def memory(f, *args):
    """Bytes besides arguments and results."""
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


NOTHING = Outputs(None, None)
PROGRAMS = {
    "forward": lambda x: recurrence(*x),
    "backward": lambda x: recurrence_bwd(x, NOTHING, Outputs(x.q, None), wrt=("q", "k", "v", "gk")),
    "tangent": lambda x: recurrence_jvp(x, NOTHING, x),
}
ORDERS = {
    "itself": lambda f: f,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "vjp": lambda f: jax.grad(lambda x: sum(y.sum() for y in jax.tree.leaves(f(x)))),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("order", ORDERS)
def test_memory_is_linear_in_the_length(program, order):
    f = ORDERS[order](PROGRAMS[program])
    short, long = memory(f, of_size(1024)), memory(f, of_size(2048))
    assert long < 2.2 * short


def test_memory_of_the_gradient_at_16384():
    """The states of all tokens together would be 1 GiB."""
    assert memory(PROGRAMS["backward"], of_size(16384, heads=4, features=64)) < 300 * 2**20
