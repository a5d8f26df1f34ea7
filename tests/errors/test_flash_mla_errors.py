"""Wrong latents and projections raise while a call is traced; other errors are those of flash_attention."""

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
GOOD = dict(
    q=f32(2, 8, 4, 24), kv_latent=f32(2, 12, 32), k_rope=f32(2, 12, 8), w_kc=f32(32, 4, 16), w_vc=f32(32, 4, 20)
)
(C,) = symbolic_shape("c")

WRONG = {
    "packed": (dict(q=f32(8, 4, 24)), ValueError, "q has 3 axes; it must have 4", "packed sequences are told apart by"),
    "packed latents": (dict(kv_latent=f32(12, 32)), ValueError, "kv_latent has 2 axes; it must have 3"),
    "heads of the rotary part": (dict(k_rope=f32(2, 12, 4, 8)), ValueError, "k_rope has 4 axes; it must have 3"),
    "a flat projection": (dict(w_kc=f32(32, 64)), ValueError, "w_kc has 2 axes", "features of a latent, heads"),
    "a list": (dict(kv_latent=[1.0]), TypeError, "kv_latent must be an array, not list"),
    "integers": (dict(w_vc=i32(32, 4, 20)), TypeError, "w_vc has dtype int32; it must be a float type"),
    "another dtype": (dict(w_kc=bf16(32, 4, 16)), TypeError, "w_kc is bfloat16 but q is float32; they must be equal"),
    "no rotary part": (dict(k_rope=f32(2, 12, 0)), ValueError, "k_rope has an axis of heads or features of size 0"),
    "batch": (
        dict(kv_latent=f32(3, 12, 32)),
        ValueError,
        "kv_latent has batch 3 but q has 2; they must be equal (kv_latent: f32[3,12,32], q: f32[2,8,4,24])",
    ),
    "batch of the rotary part": (dict(k_rope=f32(1, 12, 8)), ValueError, "k_rope has batch 1 but q has 2"),
    "length": (dict(k_rope=f32(2, 8, 8)), ValueError, "k_rope has length 8 but kv_latent has 12"),
    "latent of keys": (dict(w_kc=f32(24, 4, 16)), ValueError, "w_kc has latent features 24 but kv_latent has 32"),
    "latent of values": (dict(w_vc=f32(24, 4, 20)), ValueError, "w_vc has latent features 24 but kv_latent has 32"),
    "heads of keys": (dict(w_kc=f32(32, 2, 16)), ValueError, "w_kc has heads 2 but q has 4; they must be equal"),
    "heads of values": (dict(w_vc=f32(32, 2, 20)), ValueError, "w_vc has heads 2 but q has 4; they must be equal"),
    "features": (
        dict(q=f32(2, 8, 4, 16)),
        ValueError,
        "q has 16 features but w_kc makes 16 and k_rope has 8; q must have as many as both",
    ),
    "any latents": (
        dict(kv_latent=f32(2, 12, C), w_kc=f32(C, 4, 16), w_vc=f32(C, 4, 20)),
        ValueError,
        "the number of features of a latent is symbolic, c; it has to be known",
    ),
    "any values": (dict(w_vc=f32(32, 4, C)), ValueError, "the number of features of a value is symbolic, c; it has to"),
    "bias": (dict(bias=f32(8, 13)), ValueError, "bias of shape (8, 13) does not broadcast to (2, 4, 8, 12)"),
    "segments of one side": (
        dict(q_segment_ids=i32(2, 8)),
        ValueError,
        "q_segment_ids is given without kv_segment_ids",
    ),
    "sinks": (dict(sinks=f32(3)), ValueError, "sinks must be [4] or [4, n]"),
    "a bad option": (dict(softcap=-1.0), ValueError, "softcap is -1.0; it must be positive and finite"),
}
MODULES = {"softcap": "logits_soft_cap", "sinks": "softmax_aux"}


@pytest.mark.parametrize("of", (ejkernel.lax, ejkernel.modules), ids=("lax", "modules"))
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name, of):
    given, kind, *says = WRONG[name]
    given = {**GOOD, **given}
    if of is ejkernel.modules:
        given = {MODULES.get(n, n): x for n, x in given.items()}
        for old, new in MODULES.items():
            says = [part.replace(old, new) for part in says]
    arrays = {n: x for n, x in given.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {n: x for n, x in given.items() if n not in arrays}
    with pytest.raises(kind) as error:
        jax.eval_shape(lambda arrays: of.flash_mla(**arrays, **static), arrays)
    message = str(error.value)
    assert message.startswith("flash_mla: ") and all(part in message for part in says), message


def test_what_is_right():
    o, lse = jax.eval_shape(partial(ejkernel.lax.flash_mla, return_lse=True), **GOOD)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == ((2, 8, 4, 20), jnp.float32, (2, 4, 8), jnp.float32)
