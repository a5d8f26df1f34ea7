"""Recurrences as EasyDeL calls them: positional and keyword arguments, and its use of the results."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel
from ejkernel import modules
from ejkernel.modules.operations.configs import GatedDeltaRuleConfig

pytestmark = pytest.mark.usefixtures("release_types")


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), jnp.float32)


def step(q, k, v, beta, decay, h):
    """One token of the gated delta rule in float64, for one head."""
    q, k = (x / np.sqrt((x * x).sum() + 1e-6) for x in (q, k))
    h = np.exp(decay) * h
    h = h + np.outer(k, beta * (v - h.T @ k))
    return h.T @ q / np.sqrt(len(q)), h


def test_gated_delta_rule_over_a_mesh():
    q, k, v, h = normal(2, 5, 2, 4), normal(2, 5, 2, 4, seed=1), normal(2, 5, 2, 3), normal(2, 2, 4, 3)
    beta, decay = jax.nn.sigmoid(normal(2, 5, 2)), -jnp.abs(normal(2, 5, 2))
    heads = P(None, None, "tp")
    o, state = modules.gated_delta_rule(
        *(q, k, v, beta, decay, h),
        **dict(use_qk_l2norm=True, use_chunked=False, return_state=True, cfg=GatedDeltaRuleConfig(chunk_size=16)),
        **dict(mesh=jax.make_mesh((2,), ("tp",)), platform=None, out_specs=(heads, P(None, "tp"))),
        in_specs=(heads, heads, heads, heads, heads, P(None, "tp")),
    )
    o, state = np.asarray(o), np.asarray(state)
    for b, head in np.ndindex(2, 2):
        exact = np.asarray(h[b, head], np.float64)
        for t in range(5):
            row, exact = step(*(np.asarray(x[b, t, head], np.float64) for x in (q, k, v, beta, decay)), exact)
            np.testing.assert_allclose(o[b, t, head], row, atol=1e-5)
        np.testing.assert_allclose(state[b, head], exact, atol=1e-5)


def test_gated_delta_rule_without_a_state():
    arrays = normal(1, 4, 2, 4), normal(1, 4, 2, 4, seed=1), normal(1, 4, 2, 3), jax.nn.sigmoid(normal(1, 4, 2))
    in_specs, mesh = (P(), P(), P(), P(), None, None), jax.make_mesh((1,), ("tp",))
    of_release = modules.gated_delta_rule(
        *arrays, None, None, use_chunked=True, mesh=mesh, in_specs=in_specs, out_specs=P()
    )
    np.testing.assert_allclose(of_release, ejkernel.lax.gated_delta_rule(*arrays), atol=1e-6)


@pytest.mark.parametrize("gated", (False, True))
def test_one_token_of_the_gated_delta_rule_by_the_function_of_the_kernels(gated):
    """EasyDeL's own tests compare its step of decoding with it."""
    module = importlib.import_module("ejkernel.kernels._xla.gated_delta_rule._xla_impl_fwd")
    q, k, v, h = normal(2, 3, 1, 4), normal(2, 3, 1, 4, seed=1), normal(2, 3, 1, 5), normal(2, 3, 4, 5)
    beta, decay = jax.nn.sigmoid(normal(2, 3, 1)), -jnp.abs(normal(2, 3, 1)) if gated else None
    arrays = dict(query=q, key=k, value=v, beta=beta, decay=decay, recurrent_state=h)
    o, state = module._single_step_gdr_fwd(**arrays)
    for b, head in np.ndindex(2, 3):
        token = [np.asarray(x[b, head, 0], np.float64) for x in (q, k, v, beta)]
        row, exact = step(*token, float(decay[b, head, 0]) if gated else 0.0, np.asarray(h[b, head], np.float64))
        np.testing.assert_allclose(o[b, head, 0], row, atol=1e-6)
        np.testing.assert_allclose(state[b, head], exact, atol=1e-6)
    as_it_is = module._single_step_gdr_fwd(**arrays, use_qk_l2norm=False)[0]
    assert as_it_is.shape == o.shape and not np.allclose(as_it_is, o)


@pytest.mark.parametrize("how", ("by keywords", "of the kernels"))
def test_ragged_gated_delta_rule(how):
    q, k, v, pool = normal(6, 2, 4), normal(6, 2, 4, seed=1), normal(6, 2, 3), normal(5, 2, 4, 3)
    beta, decay = jax.nn.sigmoid(normal(6, 2)), -jnp.abs(normal(6, 2))
    cuts, slots = jnp.array([0, 4, 5, 5]), jnp.array([3, 1, 0])
    if how == "by keywords":
        arrays = dict(query=q, key=k, value=v, beta=beta, decay=decay, recurrent_state=pool)
        arrays |= dict(query_start_loc=cuts, state_indices=slots)
        o, states = modules.ragged_gated_delta_rule(**arrays, chunk_size=64, use_qk_l2norm=True)
    else:
        prefill = importlib.import_module("ejkernel.kernels._xla.ragged_gated_delta_rule._xla_impl_fwd")
        decode = importlib.import_module("ejkernel.kernels._pallas.tpu.ragged_gated_delta_rule._interface")
        states, o = prefill._ragged_gdr_chunked_prefill(q, k, v, beta, decay, pool, cuts, slots, 64, True)
        one = (x[4:5] for x in (q, k, v, beta, decay))
        np.testing.assert_allclose(decode._decode_path(*one, pool, slots[1:2], True)[0], o[4:5], atol=1e-6)
    for first, after, slot in ((0, 4, 3), (4, 5, 1)):
        each = (x[None, first:after] for x in (q, k, v, beta, decay))
        wanted, state = ejkernel.lax.gated_delta_rule(*each, pool[slot][None], return_state=True)
        np.testing.assert_allclose(o[first:after], wanted[0], atol=1e-6)
        np.testing.assert_allclose(states[slot], state[0], atol=1e-6)
    np.testing.assert_array_equal(states[jnp.array([0, 2, 4])], pool[jnp.array([0, 2, 4])])
    assert not o[5].any()


def test_state_space_v1_with_a_gate():
    x, B, C, D, conv = normal(2, 5, 8), normal(2, 5, 4), normal(2, 5, 4, seed=1), normal(8), normal(2, 8, 3)
    A, dt, gate = -jnp.exp(normal(8, 4)), jax.nn.softplus(normal(2, 5, 8, seed=1)), normal(2, 5, 8, seed=2)
    y, state, conv_state = modules.state_space_v1(
        x, A, B, C, D, dt, gate=gate, initial_state=None, conv_state=conv, act_fn=jnp.tanh
    )
    wanted, final = ejkernel.lax.state_space_v1(x, A, B, C, D, dt, return_state=True)
    np.testing.assert_allclose(y, wanted * jnp.tanh(gate), atol=1e-6)
    np.testing.assert_allclose(state, final, atol=1e-6)
    assert conv_state is conv


@pytest.mark.parametrize("norm", (False, True))
def test_state_space_v2_with_a_gate(norm):
    x, B, C, D = normal(2, 5, 4, 3), normal(2, 5, 2, 6), normal(2, 5, 2, 6, seed=1), normal(4)
    A, dt, gate = -jnp.exp(normal(4, seed=1)), jax.nn.softplus(normal(2, 5, 4)), normal(2, 5, 12)
    options = dict(n_groups=2, use_gated_rmsnorm=norm, rmsnorm_eps=1e-5, precision=None, act_fn=jax.nn.silu)
    y, state, conv_state = modules.state_space_v2(x, A, B, C, D, dt, gate=gate, conv_state=None, **options)
    wanted, final = ejkernel.lax.state_space_v2(x, A, B, C, D, dt, return_state=True)
    wanted = wanted.reshape(2, 5, 12)
    if norm:
        wanted = wanted / jnp.sqrt((wanted**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, wanted * jax.nn.silu(gate), atol=1e-5)
    np.testing.assert_allclose(state, final, atol=1e-6)
    assert conv_state is None
    with pytest.raises(ValueError, match="n_groups is 1, but B has 2"):
        modules.state_space_v2(x, A, B, C, D, dt, n_groups=1)


def test_the_norm_of_state_space_v2_is_in_the_dtype_of_float64_arrays():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, B, C, gate = (rng.standard_normal(s) for s in ((1, 5, 4, 3), (1, 5, 2, 6), (1, 5, 2, 6), (1, 5, 12)))
        rest = B, C, np.ones(4), np.full((1, 5, 4), 0.1)
        y = np.asarray(ejkernel.lax.state_space_v2(x, -np.ones(4), *rest)).reshape(1, 5, 12)
        found = modules.state_space_v2(x, -np.ones(4), *rest, gate=gate, use_gated_rmsnorm=True)[0]
        normed = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(found, normed * gate / (1 + np.exp(-gate)), rtol=0, atol=1e-14)


@pytest.mark.parametrize("norm", (False, True))
def test_a_gate_of_no_tokens(norm):
    x, B, A, dt = normal(1, 0, 4, 3), normal(1, 0, 2, 6), -jnp.ones(4), jnp.ones((1, 0, 4))
    gated = dict(gate=normal(1, 0, 12), use_gated_rmsnorm=norm)
    y, state, _ = modules.state_space_v2(x, A, B, B, jnp.ones(4), dt, **gated)
    assert y.shape == (1, 0, 12) and not state.any()
