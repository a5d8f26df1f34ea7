"""Any value for any argument of an operation gives the right result, or an error of the library.

The arguments are those in the signatures of registered operations, and the calls those of `tests/cases`. Errors are
raised before anything is compiled, so a normal run only traces the calls; computing the accepted ones takes minutes and
is a slow test.
"""

import inspect

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ejkernel
from ejkernel.modules._operation import OPERATIONS
from tests.cases import CASES, assert_close, with_primitives
from tests.cases._oracle import in_float64

OF_OUR_OWN = (TypeError, ValueError, NotImplementedError)

# --- What is given in the place of an array ---------------------------------------------------------------------------

NO_ARRAYS = {
    "nothing": None,
    "word": "abc",
    "bytes": b"abc",
    "number": 3,
    "half": 2.5,
    "truth": True,
    "nan": float("nan"),
    "huge": 2**40,
    "beyond": 10**400,
    "complex": 1j,
    "object": object(),
    "function": len,
    "class": np.float32,
    "tuple": (1.0, 2.0),
    "mapping": {"a": 1},
    "nested list": [[1.0], [2.0, 3.0]],
    "record": np.zeros(2, [("a", "f4")]),
    "texts": np.array(["a"]),
    "objects": np.array([None]),
    "dates": np.zeros(2, "M8[s]"),
    "numpy's long": np.longdouble(1),
    "masked": np.ma.masked_array([1.0, 2.0], [True, False]),
    "scalar of numpy": np.float64(0.5),
    "64 bits": np.array([2**40, 1]),
    "key": "key",
    "float0": np.zeros((2, 3), jax.dtypes.float0),
}
DTYPES = (
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32", "complex64",
    *(name for name in ("int2", "int4", "uint4", "float4_e2m1fn", "float8_e8m0fnu", "float8_e4m3fn", "float8_e5m2",
                        "float8_e4m3b11fnuz", "float8_e3m4") if hasattr(ml_dtypes, name) and hasattr(jnp, name)),
)  # fmt: skip
WIDE = ("float64", "int64", "uint64", "complex128")


def shapes_of(x):
    """The array with an axis more or less, and with each of its axes empty, longer, or of size 1."""
    x = np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    yield "an axis more", x[None]
    yield "an axis after", x[..., None]
    yield "0-d", np.zeros((), x.dtype)
    for axis, size in enumerate(x.shape):
        take = lambda n, axis=axis, size=size: np.take(x, np.arange(n) % max(size, 1), axis)
        yield f"without axis {axis}", take(1).squeeze(axis)
        yield f"axis {axis} empty", take(0)
        yield f"axis {axis} longer", take(size + 1)
        if size > 1:
            yield f"axis {axis} of 1", take(1)


def instead_of(x):
    """Values to give instead of this array: (name, value)."""
    for name, value in NO_ARRAYS.items():
        yield name, jax.random.key(0) if value is NO_ARRAYS["key"] else value
    if x is None:
        yield from (("floats", jnp.ones((2, 3))), ("integers", jnp.ones(4, int)), ("truths", jnp.ones((), bool)))
        return
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        yield "list", np.asarray(x).tolist()
        yield "numpy", np.asarray(x)
        yield "big endian", np.asarray(x).astype(np.asarray(x).dtype.newbyteorder(">"))
        for dtype in DTYPES:
            with np.errstate(invalid="ignore", over="ignore"):
                yield dtype, jnp.asarray(np.asarray(x).astype(jnp.dtype(dtype)))
        for dtype in WIDE:
            yield f"{dtype} of numpy", np.asarray(x).astype(dtype)
    yield from shapes_of(x)


# --- What is given for an option --------------------------------------------------------------------------------------

OPTIONS = {
    "nothing": None,
    "word": "abc",
    "empty word": "",
    "nan": float("nan"),
    "inf": float("inf"),
    "minus inf": float("-inf"),
    "minus one": -1,
    "zero": 0,
    "one": 1,
    "three": 3,
    "huge": 2**40,
    "beyond": 10**400,
    "far beyond": 10**5000,
    "minus beyond": -(10**400),
    "half": 0.5,
    "two": 2.0,
    "tiny": 1e-300,
    "large": 1e300,
    "yes": True,
    "no": False,
    "numpy's int": np.int64(3),
    "numpy's byte": np.uint8(3),
    "numpy's float": np.float32(0.5),
    "numpy's bool": np.bool_(True),
    "numpy's array": np.array([1, 2]),
    "an array": np.float32(0.5) * np.ones(()),
    "complex": 1j,
    "list": [1, 2],
    "pair": (2, 1),
    "pair of None": (None, None),
    "pair of floats": (1.0, 2.0),
    "pair of truths": (True, False),
    "pair of numpy's": (np.int32(2), np.int64(1)),
    "pair of huge": (2**40, 2**70),
    "negative pair": (-1, 0),
    "nan pair": (float("nan"), 0),
    "triple": (1, 2, 3),
    "mapping": {"block_q": 8},
    "set": {1, 2},
    "dtype": np.dtype("float32"),
    "float16": "float16",
    "record": "f4,f4",
    "broken record": "(2,",
    "object": object(),
    "function": len,
    "class": np.float32,
}


# --- The calls --------------------------------------------------------------------------------------------------------


def parameters(operation, kind):
    of = inspect.signature(OPERATIONS[operation].prepare_arguments).parameters.values()
    return [parameter.name for parameter in of if parameter.kind is kind]


def calls(names_of):
    """(case, name of an argument, whether to compute): a normal run traces the first case that has the argument."""
    found, seen = [], set()
    for case in with_primitives(CASES):
        for name in names_of(case):
            first = (case.operation, name) not in seen
            seen.add((case.operation, name))
            found.append(pytest.param(case, name, False, id=f"{case}-{name}", marks=() if first else pytest.mark.slow))
            found.append(pytest.param(case, name, True, id=f"{case}-{name}-computed", marks=pytest.mark.slow))
    return found


def given(case):
    return list(case.operands)


def absent(case):
    """Operands that the case does not have, for the first case of each operation."""
    if case is not next(c for c in CASES if c.operation == case.operation):
        return []
    return [n for n in parameters(case.operation, inspect.Parameter.POSITIONAL_OR_KEYWORD) if n not in case.operands]


def options(case):
    of_arrays = [name for name in ("softmax_scale",) if name in case.operands]
    return [n for n in parameters(case.operation, inspect.Parameter.KEYWORD_ONLY) if n not in of_arrays]


def check(case, arguments, of, computed):
    """The right result, or an error that begins with the name of the operation."""
    call = lambda: jax.tree.leaves(getattr(ejkernel.lax, case.operation)(**arguments))
    try:
        found = call() if computed else jax.eval_shape(call)
    except OF_OUR_OWN as error:
        said = str(error)
        assert said.startswith(case.operation), f"{of}: {type(error).__name__}: {said}"
        assert len(said) < 400, f"{of}: {said}"
        return
    except Exception as error:
        raise AssertionError(f"{of}: {type(error).__name__}: {error}") from error
    if not computed:
        return
    tolerance = 2e-2 if any(x.dtype.itemsize < 4 for x in found) else 1e-4
    assert_close(found, expected(case, arguments), tolerance, f"{of}: ")


def expected(case, arguments):
    """The result of the formula for the arguments, in float64."""
    is_array = lambda name, x: isinstance(x, jax.Array) or (name in case.operands and isinstance(x, np.ndarray))
    arrays = {name: jnp.asarray(x) for name, x in arguments.items() if is_array(name, x)}
    static = {name: x for name, x in arguments.items() if name not in arrays}

    def formula(arrays):
        call = OPERATIONS[case.operation].prepare_arguments(**arrays, **static)
        outputs = case.reference(*case.algorithm.operands(**call.named), spec=call.spec)
        return jax.tree.leaves(call.finish(outputs._asdict()))

    return in_float64(jax.jit(formula))(arrays)


@pytest.mark.parametrize("case, name, computed", [*calls(given), *calls(absent)])
def test_arrays(case, name, computed):
    arrays = case.arrays()
    for of, value in instead_of(arrays.get(name)):
        check(case, {**arrays, **case.options, name: value}, of, computed)


@pytest.mark.parametrize("case, name, computed", calls(options))
def test_options(case, name, computed):
    arrays = case.arrays()
    for of, value in OPTIONS.items():
        check(case, {**arrays, **case.options, name: value}, of, computed)
