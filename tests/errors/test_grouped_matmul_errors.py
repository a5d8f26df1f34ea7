"""Wrong calls raise while they are traced, with the operation, the operand, the numbers and the rule."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.export import symbolic_shape

import ejkernel

pytestmark = pytest.mark.core


def array_of(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


f32, bf16, i8, i32 = (partial(array_of, dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.int32))
GOOD = dict(lhs=f32(24, 8), rhs=f32(4, 8, 12), group_sizes=i32(4))

WRONG = {
    "rank of lhs": (dict(lhs=f32(1, 24, 8)), ValueError, "lhs has 3 axes; it must have 2", "lhs: f32[1,24,8]"),
    "rank of rhs": (dict(rhs=f32(8, 12)), ValueError, "rhs has 2 axes; it must have 3: groups, features, columns"),
    "rank of sizes": (dict(group_sizes=i32(1, 4)), ValueError, "group_sizes has 2 axes; it must have 1: groups"),
    "features": (dict(rhs=f32(4, 12, 8)), ValueError, "rhs has 12 features but lhs has 8; they must be equal"),
    "transposed": (dict(transpose_rhs=True), ValueError, "rhs has 12 features but lhs has 8", "rhs: f32[4,8,12]"),
    "no columns": (dict(rhs=f32(4, 8, 0)), ValueError, "rhs has 0 columns; it must have some"),
    "groups": (dict(group_sizes=i32(6)), ValueError, "group_sizes has 6 groups but rhs has 4; they must be equal, or"),
    "fewer groups": (
        dict(group_sizes=i32(3), group_offset=i32()),
        ValueError,
        "group_sizes has 3 groups but rhs has 4; they must be at least as many",
    ),
    "offset": (
        dict(group_sizes=i32(6), group_offset=i32(2)),
        ValueError,
        "group_offset must be a scalar or [1]",
        "group_offset: i32[2]",
    ),
    "offset before all": (
        dict(group_sizes=i32(6), group_offset=-1),
        ValueError,
        "group_offset is -1; it must be at least 0",
    ),
    "offset of 64 bits": (dict(group_offset=2**40), ValueError, "group_offset is 1099511627776; it must be at least 0"),
    "true offset": (dict(group_offset=True), TypeError, "group_offset must be an array, not bool"),
    "sizes in a list": (dict(group_sizes=[6, 6, 6, 6]), TypeError, "group_sizes must be an array, not list"),
    "sizes of 64 bits": (
        dict(group_sizes=np.array([2**40, 0, 0, 0])),
        ValueError,
        "group_sizes holds 1099511627776, which is no number of 32 bits",
    ),
    "any groups": (
        dict(rhs=f32(*symbolic_shape("e"), 8, 12), group_sizes=i32(*symbolic_shape("e"))),
        ValueError,
        "the number of groups is symbolic, e; it has to be known",
    ),
    "narrow": (dict(lhs=array_of(jnp.float8_e4m3fn, 24, 8)), TypeError, "it must be a float type: float16, bfloat16"),
    "existing_out": (dict(existing_out=f32(24, 8)), ValueError, "existing_out must be (24, 12), rows of lhs and"),
    "scale": (dict(rhs_scale=f32(12)), ValueError, "rhs_scale must be a scalar, [4] or [4, 12]", "rhs_scale: f32[12]"),
    "integers": (dict(lhs=i8(24, 8)), TypeError, "lhs has dtype int8; it must be a float type"),
    "float sizes": (dict(group_sizes=f32(4)), TypeError, "group_sizes has dtype float32; it must be an integer type"),
    "float offset": (dict(group_offset=f32()), TypeError, "group_offset has dtype float32; it must be an integer type"),
    "integer scale": (dict(rhs_scale=i32(4)), TypeError, "rhs_scale has dtype int32; it must be a float type"),
    "no array": (dict(lhs=[1.0]), TypeError, "lhs must be an array, not list"),
    "no dtype": (
        dict(preferred_element_type="wide"),
        TypeError,
        "preferred_element_type is 'wide'; it must be a dtype",
    ),
    "result": (dict(preferred_element_type=jnp.int32), TypeError, "preferred_element_type is int32; it must be one of"),
    "no result": (dict(preferred_element_type=None), TypeError, "preferred_element_type is None; it must be a dtype"),
    "wide result": (
        dict(preferred_element_type=jnp.float64),
        TypeError,
        "preferred_element_type is float64; it must be one of float32, bfloat16, float16",
    ),
    "transpose": (dict(transpose_rhs=1), TypeError, "transpose_rhs must be True or False, not int"),
    "unknown option": (dict(tiling=3), TypeError, "unexpected keyword argument 'tiling'"),
}


@pytest.mark.parametrize(
    "function", (ejkernel.lax.grouped_matmul, ejkernel.modules.grouped_matmul), ids=("lax", "modules")
)
@pytest.mark.parametrize("changed, error, says", [(c, e, says) for c, e, *says in WRONG.values()], ids=WRONG)
def test_errors_name_the_argument(function, changed, error, says):
    arguments = {**GOOD, **changed}
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    options = {name: x for name, x in arguments.items() if name not in arrays}
    with pytest.raises(error) as raised:
        jax.eval_shape(lambda arrays: function(**arrays, **options), arrays)
    message = str(raised.value)
    assert type(raised.value) is error
    assert message.startswith("grouped_matmul"), message
    assert all(part in message for part in says), message
    assert len(message) < 400 and "\n" not in message, message


def test_operands_of_two_float_types_are_those_of_the_modules_api_alone():
    """The modules API promotes them: tests/modules/test_release_form.py."""
    with pytest.raises(TypeError, match="grouped_matmul: rhs is bfloat16 but lhs is float32; it must be that or"):
        jax.eval_shape(ejkernel.lax.grouped_matmul, **{**GOOD, "rhs": bf16(4, 8, 12)})
