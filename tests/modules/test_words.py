"""Errors use the argument names of the API that was called."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel
from ejkernel.errors import UnsupportedError
from ejkernel.modules import GLA, FlashAttention, _primitive_kernel
from ejkernel.types import Target

Q = jnp.ones((1, 8, 2, 4))

# (arguments of modules, arguments of lax, the message of modules)
WRONG = {
    "window": (dict(sliding_window=-1), dict(window=-1), "sliding_window is -1; a number of keys"),
    "softcap": (dict(logits_soft_cap=-1.0), dict(softcap=-1.0), "logits_soft_cap is -1.0; it must be positive"),
    "sinks": (dict(softmax_aux=jnp.ones(3)), dict(sinks=jnp.ones(3)), "softmax_aux"),
    "rate": (dict(dropout_prob=2.0), dict(dropout_rate=2.0), "dropout_prob"),
    "one of two": (
        dict(cum_seqlens_q=jnp.arange(3)),
        dict(cu_seqlens_q=jnp.arange(3)),
        "cum_seqlens_q and cum_seqlens_k",
    ),
}


@pytest.mark.parametrize("modules, lax, says", WRONG.values(), ids=WRONG)
def test_of_attention(modules, lax, says):
    with pytest.raises((TypeError, ValueError)) as of_lax:
        ejkernel.lax.flash_attention(Q, Q, Q, **lax)
    for call in (ejkernel.modules.flash_attention, FlashAttention()):
        with pytest.raises(type(of_lax.value)) as told:
            call(Q, Q, Q, **modules)
        assert says in str(told.value) and str(told.value) != str(of_lax.value)
        assert not any(f" {name} " in str(told.value) for name in lax)


def test_of_two_arguments_together():
    cuts = jnp.arange(3)
    for call in (ejkernel.modules.flash_attention, FlashAttention()):
        with pytest.raises(ValueError, match="since cum_seqlens are given"):
            call(Q, Q, Q, cum_seqlens_q=cuts, cum_seqlens_k=cuts)
    with pytest.raises(ValueError, match="since cu_seqlens are given"):
        ejkernel.lax.flash_attention(Q, Q, Q, cu_seqlens_q=cuts, cu_seqlens_k=cuts)


def test_of_the_reasons_of_implementations(monkeypatch):
    monkeypatch.setattr(_primitive_kernel, "local_target", lambda: Target("cuda", "NVIDIA H200"))
    q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    for call in (ejkernel.modules.flash_attention, FlashAttention()):
        with pytest.raises(UnsupportedError, match="pallas/gpu    logits_soft_cap is 1e"):
            jax.eval_shape(partial(call, platform="pallas", logits_soft_cap=1e9), q, q, q)


def test_of_a_gate():
    for call in (ejkernel.modules.gla, GLA()):
        with pytest.raises((TypeError, ValueError), match=r"gla: g .*\(.*g: "):
            call(Q, Q, Q, g=jnp.ones((1, 8, 2, 3)))


@pytest.mark.parametrize("modules, lax, says", WRONG.values(), ids=WRONG)
def test_over_a_mesh(modules, lax, says):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    heads = P(None, None, "x")
    with pytest.raises((TypeError, ValueError)) as told:
        ejkernel.modules.flash_attention(
            Q, Q, Q, **modules, mesh=mesh, in_specs=dict.fromkeys("qkv", heads), out_specs=heads
        )
    assert says in str(told.value) and not any(f" {name} " in str(told.value) for name in lax)


def test_in_the_form_of_the_release():
    """There q, k and g are query, key and decay."""
    arrays = dict(query=jnp.ones((6, 2, 4)), key=jnp.zeros((6, 2, 4)), value=jnp.ones((6, 2, 3)), beta=jnp.ones((6, 2)))
    arrays |= dict(recurrent_state=jnp.ones((5, 2, 4, 3)), query_start_loc=jnp.array([0, 6]))
    arrays |= dict(state_indices=jnp.array([0]), decay=jnp.zeros((6, 2)))
    step = ejkernel.modules.ragged_gated_delta_rule
    with pytest.raises(ValueError, match=r"key is \(6, 2, 5\) but query is .*\(query: f32\[6,2,4\], key: f32"):
        step(**arrays | dict(key=jnp.zeros((6, 2, 5))))
    with pytest.raises(ValueError, match=r": decay must be \(6, 2\).* of value \(decay: f32\[6,3\]\)"):
        step(**arrays | dict(decay=jnp.zeros((6, 3))))
