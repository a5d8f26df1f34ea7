"""Wrong calls raise while they are traced, with the operation, the operand, the numbers and the rule."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.export import symbolic_shape

import ejkernel

pytestmark = pytest.mark.core


def array_of(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


f32, i32 = (partial(array_of, dtype) for dtype in (jnp.float32, jnp.int32))

WRONG = {
    "rank": (dict(x=f32(8, 4)), ValueError, "x has 2 axes; it must have 3: batch, length, features", "x: f32[8,4]"),
    "rank of packed": (dict(x=f32(2, 8, 4), cu_seqlens=i32(3)), ValueError, "x has 3 axes; it must have 2: tokens"),
    "rank of lengths": (dict(x=f32(8, 4), cu_seqlens=i32(1, 3)), ValueError, "cu_seqlens has 2 axes; it must have 1"),
    "no sequence": (dict(x=f32(8, 4), cu_seqlens=i32(1)), ValueError, "cu_seqlens must have sequences + 1 ≥ 2 entries"),
    "any sequences": (
        dict(x=f32(8, 4), cu_seqlens=i32(*symbolic_shape("n"))),
        ValueError,
        "cu_seqlens is symbolic; the number of sequences has to be known",
    ),
    "integers": (dict(x=i32(2, 8, 4)), TypeError, "x has dtype int32; it must be a float type"),
    "float lengths": (dict(x=f32(8, 4), cu_seqlens=f32(3)), TypeError, "cu_seqlens has dtype float32; it must be an"),
    "no array": (dict(x=[1.0]), TypeError, "x must be an array, not list"),
    "no chunk": (dict(x=f32(2, 8, 4), chunk_size=0), ValueError, "chunk_size is 0; it must be at least 1"),
    "half a chunk": (dict(x=f32(2, 8, 4), chunk_size=0.5), TypeError, "chunk_size must be an int or None, not float"),
}


@pytest.mark.parametrize("function", (ejkernel.lax.mean_pooling, ejkernel.modules.mean_pooling), ids=("lax", "modules"))
@pytest.mark.parametrize("arguments, error, says", [(a, e, says) for a, e, *says in WRONG.values()], ids=WRONG)
def test_errors_name_the_argument(function, arguments, error, says):
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    options = {name: x for name, x in arguments.items() if name not in arrays}
    with pytest.raises(error) as raised:
        jax.eval_shape(lambda arrays: function(**arrays, **options), arrays)
    message = str(raised.value)
    assert type(raised.value) is error
    assert message.startswith("mean_pooling"), message
    assert all(part in message for part in says), message
    assert len(message) < 400 and "\n" not in message, message
