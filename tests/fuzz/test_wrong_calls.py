"""A call with one wrong argument is refused by the library, or is valid after all and is traced."""

import inspect
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import ejkernel
from ejkernel.modules._operation import OPERATIONS

from .calls import Call
from .checks import is_clean
from .operations._draws import pick
from .search import QUIET
from .strategies import calls

ODD = (None, True, -1, 0, 1, 7, 2**31, 2**40, 0.5, -1.5, 1e39, float("nan"), float("inf"), "1", "", (), (1,), (-1, 2))
ODD += ((2**40, None), (1.5, 2), [1, 2], {}, {"block_q": 16}, {"block_q": -4}, {"platform": "nowhere"}, b"x", 1j)
ODD += (np.float32(2), np.int64(3), np.zeros(2), np.bool_(True), jnp.float32, object())
DTYPES = ("float32", "bfloat16", "int32", "bool", "complex64", "uint8", "int8", "float16")


@st.composite
def wrong(draw, operation: str) -> tuple[Call, str, object]:
    """A call, the operand or option that is made wrong, and how."""
    call = replace(draw(calls(operation))[0], mesh=None, maps=(), x64=False)
    options = _options(operation)
    how = pick(draw, "option", "option", "shape", "shape", "rank", "dtype", "missing", "object")
    if how == "option":
        return call, pick(draw, *options), pick(draw, *ODD)
    name = pick(draw, *call.operands)
    shape, dtype = call.arrays()[name].shape, call.arrays()[name].dtype
    if how == "shape" and shape:
        at, by = pick(draw, *range(len(shape))), pick(draw, -1, 1, 2, 100, -1000)
        shape = tuple(max(0, n + by) if i == at else n for i, n in enumerate(shape))
    if how == "rank":
        shape = pick(draw, (*shape, 1), (1, *shape), shape[1:], shape[:-1], ())
    if how == "dtype":
        dtype = jnp.dtype(pick(draw, *DTYPES))
    if how == "missing":
        return call, name, None
    if how == "object":
        return call, name, pick(draw, *ODD)
    return call, name, jax.ShapeDtypeStruct(shape, dtype)


def _options(operation: str) -> list[str]:
    parameters = inspect.signature(getattr(ejkernel.lax, operation)).parameters.values()
    return [p.name for p in parameters if p.kind == p.KEYWORD_ONLY] + ["nothing_of_this_name"]


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("count", (60, pytest.param(1000, marks=pytest.mark.slow)))
def test_wrong_calls(operation, count):
    @seed(count)
    @settings(QUIET, max_examples=count)
    @given(wrong(operation))
    def run(drawn):
        call, name, what = drawn
        arrays = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in call.arrays().items()}
        if "dropout_key" in arrays:
            arrays["dropout_key"] = jax.eval_shape(jax.random.key, 0)
        options = dict(call.options)
        place = arrays if name in arrays else options
        place[name] = what
        is_array = lambda x: isinstance(x, jax.ShapeDtypeStruct)
        static = {n: x for n, x in arrays.items() if not is_array(x)} | options
        arrays = {n: x for n, x in arrays.items() if is_array(x)}
        f = lambda arrays: getattr(ejkernel.lax, operation)(**arrays, **static)
        try:
            jax.eval_shape(f, arrays)
        except Exception as error:
            message = f"{type(error).__name__}: {error}\n{operation}(**{arrays}, **{static})"
            assert is_clean(operation, error), message

    run()
