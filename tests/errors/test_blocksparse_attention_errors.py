"""Wrong block masks and block sizes raise while a call is traced; other errors are those of flash_attention."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import ejkernel

pytestmark = pytest.mark.core


def array_of(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


f32, i32, bits = (partial(array_of, dtype) for dtype in (jnp.float32, jnp.int32, jnp.bool_))
GOOD = dict(q=f32(2, 8, 4, 16), k=f32(2, 12, 2, 16), v=f32(2, 12, 2, 16), block_mask=bits(2, 3), block_size=(4, 5))
PACKED = dict(q=f32(8, 4, 16), k=f32(12, 2, 16), v=f32(12, 2, 16), cu_seqlens_q=i32(3), cu_seqlens_k=i32(3))

WRONG = {
    "floats": (dict(block_mask=f32(2, 3)), TypeError, "block_mask has dtype float32; it must be bool"),
    "a list": (dict(block_mask=[[True] * 3] * 2), TypeError, "block_mask must be an array, not list"),
    "none": (dict(block_mask=None), TypeError, "block_mask must be an array, not NoneType"),
    "one axis": (dict(block_mask=bits(3)), ValueError, "block_mask has 1 axes; it must have 2 to 4"),
    "five axes": (dict(block_mask=bits(1, 1, 1, 2, 3)), ValueError, "block_mask has 5 axes", "bool[1,1,1,2,3]"),
    "queries": (
        dict(block_mask=bits(3, 3)),
        ValueError,
        "block_mask has 3 blocks of queries; 8 queries in blocks of 4 are 2",
        "q: f32[2,8,4,16]",
    ),
    "keys": (dict(block_mask=bits(2, 2)), ValueError, "2 blocks of keys; 12 keys in blocks of 5 are 3"),
    "the usual blocks": (dict(block_size=(128, 128)), ValueError, "8 queries in blocks of 128 are 1"),
    "key heads": (
        dict(block_mask=bits(2, 2, 3)),
        ValueError,
        "block_mask has heads 2 but q has 4; it must be that or 1",
    ),
    "batch": (
        dict(block_mask=bits(4, 1, 2, 3)),
        ValueError,
        "block_mask has batch 4 but q has 2; it must be that or 1",
    ),
    "batch of packed": (PACKED | dict(block_mask=bits(2, 1, 2, 3)), ValueError, "block_mask has batch 2 but q has 1"),
    "one size": (dict(block_size=4), TypeError, "block_size is 4; it must be a pair of ints, of queries and keys"),
    "three sizes": (dict(block_size=(4, 5, 6)), TypeError, "block_size is (4, 5, 6); it must be a pair"),
    "no size": (dict(block_size=(4, 0)), ValueError, "block_size has 0 keys; it must be a positive int"),
    "half a size": (dict(block_size=(4.0, 5)), TypeError, "block_size has 4.0 queries; it must be an int"),
    "true": (dict(block_size=(True, 5)), TypeError, "block_size has True queries; it must be an int"),
    "another error": (dict(k=f32(2, 12, 3, 16)), ValueError, "v has length 12 and 2 heads but k has 12 and 3"),
}


@pytest.mark.parametrize("of", (ejkernel.lax, ejkernel.modules), ids=("lax", "modules"))
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name, of):
    given, kind, *says = WRONG[name]
    renamed = lambda n: n.replace("cu_", "cum_") if of is ejkernel.modules else n
    given = {renamed(n): x for n, x in {**GOOD, **given}.items()}
    arrays = {n: x for n, x in given.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {n: x for n, x in given.items() if n not in arrays}
    with pytest.raises(kind) as error:
        jax.eval_shape(lambda arrays: of.blocksparse_attention(**arrays, **static), arrays)
    message = str(error.value)
    assert message.startswith("blocksparse_attention: ") and all(part in message for part in says), message


def test_what_is_right():
    shape = lambda **given: (
        jax.eval_shape(
            lambda arrays: ejkernel.lax.blocksparse_attention(**arrays, block_size=(4, 5)),
            {n: x for n, x in {**GOOD, **given}.items() if n != "block_size"},
        ).shape
    )
    assert {shape(block_mask=bits(*leading, 2, 3)) for leading in ((), (4,), (1,), (2, 1), (2, 4))} == {(2, 8, 4, 16)}
    assert shape(**PACKED, block_mask=bits(4, 2, 3)) == (8, 4, 16)
