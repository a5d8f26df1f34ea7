"""Wrong calls over pages raise while they are traced, with operation, operand, numbers and rule."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.export import symbolic_shape

import ejkernel

pytestmark = pytest.mark.core


def array_of(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


f32, f16, i32, i8 = (partial(array_of, dtype) for dtype in (jnp.float32, jnp.float16, jnp.int32, jnp.int8))

PAGE_ATTENTION = dict(
    q=f32(3, 4, 16),
    k_pages=f32(10, 8, 2, 16),
    v_pages=f32(10, 8, 2, 24),
    context_lens=i32(3),
    block_tables=i32(3, 5),
)
WRONG = {
    "rank": (dict(q=f32(1, 3, 4, 16)), ValueError, "q has 4 axes; it must have 3: sequences, heads, features"),
    "rank of pages": (dict(k_pages=f32(80, 2, 16)), ValueError, "k_pages has 3 axes; it must have 4: pages, slots of"),
    "any page": (
        dict(k_pages=f32(10, *symbolic_shape("z"), 2, 16)),
        ValueError,
        "the number of slots of a page is symbolic, z; it has to be known",
    ),
    "heads": (dict(q=f32(3, 5, 16)), ValueError, "k_pages has 2 heads but q has 5; query heads must be a multiple"),
    "features": (dict(q=f32(3, 4, 8)), ValueError, "k_pages has 16 features but q has 8; they must be equal"),
    "pools": (dict(v_pages=f32(9, 8, 2, 16)), ValueError, "v_pages must be [10, 8, 2] of features, as k_pages is"),
    "integer queries": (dict(q=i32(3, 4, 16)), TypeError, "q has dtype int32; it must be a float type"),
    "dtypes": (dict(q=f16(3, 4, 16)), TypeError, "k_pages is float32 but q is float16; it must be that or float8_e4m3"),
    "dtypes of pools": (dict(v_pages=i8(10, 8, 2, 24)), TypeError, "v_pages is int8 but k_pages is float32; they must"),
    "no pages": (dict(k_pages=f32(0, 8, 2, 16)), ValueError, "k_pages has the shape (0, 8, 2, 16); no axis of it may"),
    "sequences": (dict(context_lens=i32(4), block_tables=i32(4, 5)), ValueError, "context_lens has 4 sequences but q"),
    "tables": (dict(block_tables=i32(2, 5)), ValueError, "block_tables must be [3, pages of a sequence], neither of t"),
    "float lengths": (dict(context_lens=f32(3)), TypeError, "context_lens has dtype float32; it must be an integer ty"),
    "sinks": (dict(sinks=f32(3)), ValueError, "sinks must be [4] or [4, n], one row a head"),
    "scale": (dict(k_scale=f32(4)), ValueError, "k_scale has the shape (4,); it must be a scalar, [2] of the heads, o"),
    "integer scale": (dict(v_scale=i32(2)), TypeError, "v_scale has dtype int32; it must be a float type"),
    "scale of text": (dict(k_scale="1"), TypeError, "k_scale must be a static number, not str"),
    "endless scale": (dict(k_scale=float("inf")), ValueError, "k_scale is inf; it must be finite"),
    "plan": (dict(plan=i32(3, 2, 6)), ValueError, "plan is int32 of the shape (3, 2, 6); it must be what page_plan gi"),
    "plan of floats": (dict(plan=f32(3, 2, 8)), ValueError, "plan is float32 of the shape (3, 2, 8); it must be what"),
    "plan of others": (dict(plan=i32(4, 2, 8)), ValueError, "plan has 4 rows; that of such a step has 3"),
    "no split": (dict(num_splits=0), ValueError, "num_splits is 0; it must be at least 1"),
    "half a split": (dict(num_splits=1.5), TypeError, "num_splits must be an int or None, not float"),
    "window": (dict(window=0), ValueError, "window is 0; a number of keys must be at least 1"),
    "cap": (dict(softcap=-1.0), ValueError, "softcap is -1.0; it must be positive and finite"),
    "no bool": (dict(return_lse=1), TypeError, "return_lse must be True or False, not int"),
}  # fmt: skip

RAGGED = dict(
    q=f32(12, 4, 16),
    kv_pages=f32(10, 8, 4, 16),
    context_lens=i32(3),
    block_tables=i32(3, 5),
    query_start_loc=i32(4),
    num_seqs=i32(1),
)
WRONG_RAGGED = {
    "rank": (dict(q=f32(1, 12, 4, 16)), ValueError, "q has 4 axes; it must have 3: tokens, heads, features"),
    "odd pages": (dict(kv_pages=f32(10, 8, 3, 16)), ValueError, "kv_pages has 3 keys and values of heads; there must"),
    "heads": (dict(kv_pages=f32(10, 8, 6, 16)), ValueError, "kv_pages has 3 heads but q has 4; query heads must be a"),
    "features": (dict(kv_pages=f32(10, 8, 4, 8)), ValueError, "kv_pages has 8 features but q has 16; they must be equ"),
    "dtypes": (dict(q=f16(12, 4, 16)), TypeError, "kv_pages is float32 but q is float16; it must be that or float8_e4"),
    "starts": (dict(query_start_loc=i32(3)), ValueError, "query_start_loc must have 4 entries, one more than sequence"),
    "too many": (dict(num_seqs=4), ValueError, "num_seqs is 4; there are tables of 3 sequences"),
    "fewer than none": (dict(num_seqs=-1), ValueError, "num_seqs is -1; there are tables of 3 sequences"),
    "no number": (dict(num_seqs=None), TypeError, "num_seqs is None; it must be an int or an array of integers"),
    "two numbers": (dict(num_seqs=i32(2)), ValueError, "num_seqs must be an int or [1]"),
    "scale": (dict(k_scale=f32(4)), ValueError, "k_scale has the shape (4,); it must be a scalar, [2] of the heads"),
    "drafts": (dict(draft_mask=f32(12, 4)), TypeError, "draft_mask has dtype float32; it must be bool"),
    "tokens of drafts": (dict(draft_mask=array_of(jnp.bool_, 3, 4)), ValueError, "draft_mask must be [12, drafts], at"),
    "plan": (dict(plan=i32(16, 2, 8)), ValueError, "plan has 16 rows; that of such a step has from 3 to 15"),
}  # fmt: skip

DECODE = dict(q=f32(3, 4, 16), k=f32(3, 50, 2, 16), v=f32(3, 50, 2, 24), sequence_start=i32(3), sequence_end=i32(3))
WRONG_DECODE = {
    "rank": (dict(q=f32(1, 3, 4, 16)), ValueError, "q has 4 axes; it must have 3: batch, heads, features"),
    "batch": (dict(k=f32(2, 50, 2, 16)), ValueError, "k has 2 sequences but q has 3; they must be equal"),
    "heads": (dict(q=f32(3, 5, 16)), ValueError, "k has 2 heads but q has 5; query heads must be a multiple"),
    "features": (dict(q=f32(3, 4, 8)), ValueError, "k has 16 features but q has 8; they must be equal"),
    "values": (dict(v=f32(3, 49, 2, 16)), ValueError, "v must be [3, 50, 2] of features, as k is"),
    "dtypes": (dict(q=f16(3, 4, 16)), TypeError, "k is float32 but q is float16; "),
    "quantised": (dict(k=i8(3, 50, 2, 16), v=i8(3, 50, 2, 24)), TypeError, "k is int8 but q is float32; they must"),
    "no keys": (dict(k=f32(3, 0, 2, 16)), ValueError, "k has the shape (3, 0, 2, 16); no axis of it may be 0"),
    "ends": (dict(sequence_end=i32(2)), ValueError, "sequence_end must be [3], one number a sequence"),
    "float ends": (dict(sequence_start=f32(3)), TypeError, "sequence_start has dtype float32; it must be an integer"),
}  # fmt: skip

LATENT = dict(
    q_latent=f32(12, 4, 16),
    q_rope=f32(12, 4, 8),
    pages=f32(10, 8, 24),
    context_lens=i32(3),
    block_tables=i32(3, 5),
    query_start_loc=i32(4),
    num_seqs=i32(1),
)
WRONG_LATENT = {
    "rank": (dict(q_rope=f32(1, 12, 4, 8)), ValueError, "q_rope has 4 axes; it must have 3: tokens, heads, features"),
    "rank of pages": (dict(pages=f32(10, 8, 1, 24)), ValueError, "pages has 4 axes; it must have 3: pages, slots of a"),
    "heads": (dict(q_rope=f32(12, 2, 8)), ValueError, "q_rope must be [12, 4] of features, at least one, as q_latent"),
    "features": (dict(pages=f32(10, 8, 16)), ValueError, "pages has 16 features but q_latent and q_rope have 16 and"),
    "dtypes": (dict(q_rope=f16(12, 4, 8)), TypeError, "q_rope is float16 but q_latent is float32; they must be equal"),
    "tokens of lists": (dict(indices=i32(3, 4)), ValueError, "indices must be [12, keys], at least one key (indices:"),
    "empty lists": (dict(indices=i32(12, 0)), ValueError, "indices must be [12, keys], at least one key (indices:"),
    "lists of heads": (dict(indices=i32(12, 1, 4)), ValueError, "indices has 3 axes; it must have 2: tokens, keys of"),
    "lists of numbers": (dict(indices=f32(12, 4)), TypeError, "indices has dtype float32; it must be an integer"),
    "scale": (dict(k_scale=f32(10, 8)), ValueError, "k_scale has the shape (10, 8); it must be a scalar, [1] of the"),
    "drafts": (dict(draft_mask=array_of(jnp.bool_, 3, 4)), ValueError, "draft_mask must be [12, drafts], at"),
    "plan": (dict(plan=i32(2, 2, 8)), ValueError, "plan has 2 rows; that of such a step has from 3 to 15"),
}  # fmt: skip


def refused(operation, arguments, error, says, api):
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    options = {name: x for name, x in arguments.items() if name not in arrays}
    with pytest.raises(error) as raised:
        jax.eval_shape(lambda arrays: getattr(api, operation)(**arrays, **options), arrays)
    message = str(raised.value)
    assert type(raised.value) is error
    assert message.startswith(operation), message
    assert all(part in message for part in says), message
    assert len(message) < 400 and "\n" not in message, message


def each(wrong):
    return pytest.mark.parametrize("changes, error, says", [(a, e, says) for a, e, *says in wrong.values()], ids=wrong)


@each(WRONG)
def test_page_attention(changes, error, says):
    refused("page_attention", PAGE_ATTENTION | changes, error, says, ejkernel.lax)


@each(WRONG_RAGGED)
def test_ragged_page_attention(changes, error, says):
    refused("ragged_page_attention", RAGGED | changes, error, says, ejkernel.lax)


@each(WRONG_DECODE)
def test_ragged_decode_attention(changes, error, says):
    refused("ragged_decode_attention", DECODE | changes, error, says, ejkernel.lax)


@each(WRONG_LATENT)
def test_multi_latent_page_attention(changes, error, says):
    refused("multi_latent_page_attention", LATENT | changes, error, says, ejkernel.lax)


def test_the_modules_name_their_own_options():
    changes = dict(softmax_aux=f32(3))
    refused("page_attention", PAGE_ATTENTION | changes, ValueError, ["softmax_aux must be [4]"], ejkernel.modules)
