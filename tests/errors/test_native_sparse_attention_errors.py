"""Wrong arguments of native sparse attention raise while a call is traced."""

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
GOOD = dict(q=f32(2, 8, 4, 24), k=f32(2, 12, 2, 24), v=f32(2, 12, 2, 20))
PACKED = dict(q=f32(1, 8, 4, 24), k=f32(1, 8, 2, 24), v=f32(1, 8, 2, 20), cu_seqlens=i32(3))

WRONG = {
    "no batch": (dict(q=f32(8, 4, 24)), ValueError, "q has 3 axes; it must have 4: batch, length, heads, features"),
    "integers": (dict(q=i32(2, 8, 4, 24)), TypeError, "q has dtype int32; it must be a float type"),
    "another dtype": (dict(k=bf16(2, 12, 2, 24)), TypeError, "k is bfloat16 but q is float32; they must be equal"),
    "batch": (dict(k=f32(1, 12, 2, 24)), ValueError, "k has batch 1 but q has 2; they must be equal"),
    "features": (dict(k=f32(2, 12, 2, 16)), ValueError, "k has features 16 but q has 24; they must be equal"),
    "heads": (
        dict(k=f32(2, 12, 3, 24), v=f32(2, 12, 3, 20)),
        ValueError,
        "k has 3 heads but q has 4; query heads must be a multiple of key/value heads (q: f32[2,8,4,24], "
        "k: f32[2,12,3,24])",
    ),
    "values": (dict(v=f32(2, 11, 2, 20)), ValueError, "v must be float32 of [2, 12, 2] and features, as k is"),
    "gates": (dict(g_cmp=f32(2, 8, 2)), ValueError, "g_cmp must be [2, 8, 4], a number for each query and head"),
    "gates of integers": (dict(g_slc=i32(2, 8, 4)), TypeError, "g_slc has dtype int32; it must be a float type"),
    "a gate of no window": (dict(g_swa=f32(2, 8, 4)), ValueError, "g_swa is given without a window"),
    "an empty window": (dict(window=0), ValueError, "window is 0; a number of keys must be at least 1"),
    "lists": (dict(block_indices=i32(2, 8, 4, 3)), ValueError, "block_indices must be [2, 8, 2] and a list of blocks"),
    "lists of floats": (dict(block_indices=f32(2, 8, 2, 3)), TypeError, "block_indices has dtype float32"),
    "lists of any length": (
        dict(block_indices=i32(2, 8, 2, *symbolic_shape("n"))),
        ValueError,
        "the number of blocks in a list is symbolic, n; it has to be known",
    ),
    "no blocks": (dict(block_counts=0), ValueError, "block_counts is 0; it must be at least 1"),
    "None of blocks": (dict(block_size=None), ValueError, "block_size is None; it must be a positive int"),
    "block_size": (dict(block_size=1.5), TypeError, "block_size must be an int or None, not float"),
    "scale": (dict(softmax_scale=f32(2)), ValueError, "softmax_scale must be a scalar"),
    "batch and sequences": (
        dict(cu_seqlens=i32(3)),
        ValueError,
        "q has batch 2; it must be 1 since cu_seqlens divides",
    ),
    "lengths of sequences": (
        dict(PACKED, k=f32(1, 9, 2, 24), v=f32(1, 9, 2, 20)),
        ValueError,
        "k has length 9 but q has 8; they must be equal since cu_seqlens divides both",
    ),
    "sequences of floats": (dict(PACKED, cu_seqlens=f32(3)), TypeError, "cu_seqlens has dtype float32"),
    "one cut": (dict(PACKED, cu_seqlens=i32(1)), ValueError, "cu_seqlens must have sequences + 1 ≥ 2 entries"),
}


@pytest.mark.parametrize("changes, error, message", WRONG.values(), ids=WRONG)
def test_wrong_arguments(changes, error, message):
    arrays = {**GOOD, **changes}
    static = {name: x for name, x in arrays.items() if not isinstance(x, jax.ShapeDtypeStruct)}
    arrays = {name: x for name, x in arrays.items() if name not in static}
    names = ("native_sparse_attention",)
    if set(changes) <= {"q", "k", "cu_seqlens", "block_counts", "block_size"}:
        names += ("native_sparse_blocks",)
    for name in names:
        of = {n: x for n, x in arrays.items() if n != "v" or name == "native_sparse_attention"}
        f = lambda arrays, name=name: getattr(ejkernel.lax, name)(**arrays, **static)
        with pytest.raises(error) as raised:
            jax.eval_shape(f, of)
        assert str(raised.value).startswith(f"{name}: ")
        assert message in str(raised.value)


def test_a_choice_needs_a_static_scale():
    f = lambda q, k, scale: ejkernel.lax.native_sparse_blocks(q, k, softmax_scale=scale)
    with pytest.raises(TypeError, match="native_sparse_blocks: softmax_scale must be a static number"):
        jax.eval_shape(f, GOOD["q"], GOOD["k"], f32())


def test_the_modules_api_names_its_own_options():
    call = lambda **x: jax.eval_shape(partial(ejkernel.modules.native_sparse_attention, sliding_window=0), **x)
    with pytest.raises(ValueError, match="sliding_window is 0"):
        call(**GOOD)
