"""Wrong calls of recurrent, gla or lightning_attention raise while they are traced, and wrong gates of state spaces."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.export import symbolic_shape

import ejkernel

pytestmark = pytest.mark.core


def array_of(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


f32, bf16, i32 = (partial(array_of, dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.int32))
GOOD = dict(q=f32(2, 8, 4, 16), k=f32(2, 8, 2, 16), v=f32(2, 8, 2, 24))
PACKED = dict(q=f32(1, 8, 4, 16), k=f32(1, 8, 2, 16), v=f32(1, 8, 2, 24), cu_seqlens=i32(4))

TOKENS = {
    "rank": (dict(q=f32(8, 4, 16)), ValueError, "q has 3 axes; it must have 4: batch, length, heads, features"),
    "length": (
        dict(k=f32(2, 9, 2, 16)),
        ValueError,
        "k has batch and length (2, 9) but q has (2, 8); they must be equal",
        "k: f32[2,9,2,16]",
    ),
    "features": (dict(k=f32(2, 8, 2, 8)), ValueError, "k has 8 features but q has 16; they must be equal"),
    "heads of v": (dict(v=f32(2, 8, 4, 24)), ValueError, "v has 4 heads but k has 2; they must be equal"),
    "head counts": (
        dict(k=f32(2, 8, 3, 16), v=f32(2, 8, 3, 24)),
        ValueError,
        "k has 3 heads but q has 4; query heads must be a multiple of key/value heads",
    ),
    "no features": (dict(v=f32(2, 8, 2, 0)), ValueError, "v has 2 heads of 0 features; neither may be 0"),
    "dtypes": (dict(k=bf16(2, 8, 2, 16)), TypeError, "k is bfloat16 but q is float32; they must be equal"),
    "integers": (dict(q=i32(2, 8, 4, 16)), TypeError, "q has dtype int32; it must be a float type"),
    "no array": (dict(v=None), TypeError, "v must be an array, not NoneType"),
    "state": (
        dict(initial_state=f32(2, 2, 16, 24)),
        ValueError,
        "initial_state must be (2, 4, 16, 24), (batch, heads, features of k, features of v)",
    ),
    "scale": (dict(softmax_scale=f32(4)), ValueError, "softmax_scale must be a scalar", "softmax_scale: f32[4]"),
    "infinite scale": (dict(softmax_scale=float("inf")), ValueError, "softmax_scale is inf; it must be finite"),
    "reverse": (dict(reverse=1), TypeError, "reverse must be True or False, not int"),
    "return_state": (dict(return_state="yes"), TypeError, "return_state must be True or False, not str"),
}
SEQUENCES = {
    "batch": (
        dict(q=f32(2, 8, 4, 16), k=f32(2, 8, 2, 16), v=f32(2, 8, 2, 24)),
        ValueError,
        "q has batch 2; it must be 1 since cu_seqlens divides its tokens into sequences",
    ),
    "rank": (dict(cu_seqlens=i32(1, 4)), ValueError, "cu_seqlens has 2 axes; it must have 1: sequences + 1"),
    "none": (dict(cu_seqlens=i32(1)), ValueError, "cu_seqlens must have sequences + 1 ≥ 2 entries"),
    "any": (
        dict(cu_seqlens=i32(*symbolic_shape("n"))),
        ValueError,
        "cu_seqlens is symbolic; the number of sequences has to be known",
    ),
    "floats": (dict(cu_seqlens=f32(4)), TypeError, "cu_seqlens has dtype float32; it must be an integer type"),
    "state": (
        dict(initial_state=f32(1, 4, 16, 24)),
        ValueError,
        "initial_state must be (3, 4, 16, 24), (sequences, heads, features of k, features of v)",
    ),
}
GATES = {
    "g": (dict(g=f32(2, 8, 2)), ValueError, "g must be (2, 8, 4), one number for each token and head of q"),
    "gk": (dict(gk=f32(2, 8, 4, 24)), ValueError, "gk must be (2, 8, 4, 16), the shape of q", "gk: f32[2,8,4,24]"),
    "gv": (dict(gv=f32(2, 8, 4, 16)), ValueError, "gv must be (2, 8, 4, 24), features of v for each token and head"),
    "g_gamma": (dict(g_gamma=f32(2)), ValueError, "g_gamma must be (4,), one number for each head of q"),
    "integers": (dict(g=i32(2, 8, 4)), TypeError, "g has dtype int32; it must be a float type"),
}
GATE_OF_GLA = {"none": (dict(gk=None), TypeError, "gk must be an array, not NoneType")}
LAYERS = {
    "beyond": (dict(layer_idx=4), ValueError, "layer_idx is 4; it must be at least 0 and below num_layers, 4"),
    "float": (dict(layer_idx=1.0), TypeError, "layer_idx must be a static int, not float"),
    "traced": (dict(num_layers=i32()), TypeError, "num_layers must be a static int, not "),
}

lax = ejkernel.lax
GLA, LIGHTNING = dict(GOOD, gk=f32(2, 8, 4, 16)), dict(GOOD, layer_idx=1, num_layers=4)
TABLES = (
    ("recurrent", lax.recurrent, GOOD, TOKENS),
    ("recurrent", lax.recurrent, PACKED, SEQUENCES),
    ("recurrent", lax.recurrent, GOOD, GATES),
    ("gla", lax.gla, GLA, GATE_OF_GLA),
    ("gla", ejkernel.modules.gla, GOOD, {"no gate": ({}, TypeError, "missing a required argument: 'g'")}),
    ("lightning_attention", lax.lightning_attention, LIGHTNING, TOKENS | LAYERS),
)


@pytest.mark.parametrize(
    "operation, function, arguments, error, says",
    [
        pytest.param(name, function, {**good, **changed}, error, says, id=f"{name}-{of.replace(' ', '_')}")
        for name, function, good, table in TABLES
        for of, (changed, error, *says) in table.items()
    ],
)
def test_errors_name_the_argument(operation, function, arguments, error, says):
    is_array = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    arrays = {name: x for name, x in arguments.items() if is_array(x)}
    options = {name: x for name, x in arguments.items() if not is_array(x)}
    with pytest.raises(error) as raised:
        jax.make_jaxpr(lambda arrays: function(**arrays, **options))(arrays)
    message = str(raised.value)
    assert type(raised.value) is error and message.startswith(operation), message
    assert all(part in message for part in says), message
    assert len(message) < 400 and "\n" not in message, message


@pytest.mark.parametrize(
    ("wrong", "says"),
    (
        (dict(act_fn="silu"), "act_fn is 'silu'; it must be a function"),
        (dict(gate=jnp.ones((1, 2, 12), jnp.int32)), "gate has dtype int32; it must be a float type"),
        (dict(use_gated_rmsnorm="no"), "use_gated_rmsnorm must be True or False"),
        (dict(use_gated_rmsnorm=True, rmsnorm_eps=-1e-5), "rmsnorm_eps is -1e-05; it must be at least 0"),
        (dict(use_gated_rmsnorm=True, rmsnorm_eps=float("nan")), "rmsnorm_eps is nan; it must be at least 0"),
        (dict(use_gated_rmsnorm=True, rmsnorm_eps="small"), "rmsnorm_eps must be a static number"),
    ),
    ids=lambda x: next(reversed(x)) if isinstance(x, dict) else "",
)
def test_options_of_a_gate_in_the_form_of_the_release(wrong, says):
    x, B, A, dt = jnp.ones((1, 2, 4, 3)), jnp.ones((1, 2, 2, 6)), -jnp.ones(4), jnp.ones((1, 2, 4))
    with pytest.raises((TypeError, ValueError), match=f"state_space_v2: {says}"):
        ejkernel.modules.state_space_v2(x, A, B, B, jnp.ones(4), dt, **dict(gate=jnp.ones((1, 2, 12))) | wrong)
