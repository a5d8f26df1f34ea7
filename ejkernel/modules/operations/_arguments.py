"""Checks and conversions of arguments that the public functions of all operations share, before a primitive is bound.

Wrong arguments raise here, before anything is traced or compiled, with messages in the format of `ejkernel.errors`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.sharding import NamedSharding, PartitionSpec

from ...errors import shown, type_error, value_error
from ...ops.utils.operands import number_of
from ...primitives._factory import KernelPrimitive
from ...primitives._sharding import aligned, explicit_axes_of, resharded
from ...types.config import LARGEST_SIZE
from ...xla_utils.symbolic import is_symbolic

# The dtypes of arithmetic. float8 is only for the matrices that an operation names; other floats have no arithmetic.
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_OF_KIND = {np.floating: FLOATS, np.integer: INTEGERS, np.bool_: ("bool",)}


def array(operation: str, name: str, x: Any) -> Any:
    """An operand as an array, from one of JAX or numpy or an object that converts to one; lists and numbers raise."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return x
    if isinstance(x, np.ndarray | np.generic):
        _require_32_bits(operation, name, x)
    elif not hasattr(x, "__jax_array__"):
        raise type_error(operation, f"{name} must be an array, not {type(x).__name__}")
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise type_error(operation, f"{name} is no array of JAX: {shown(str(error))}") from error


def array_or_none(operation: str, name: str, x: Any) -> Any:
    """As `array`, for an operand that may be None."""
    return None if x is None else array(operation, name, x)


def _require_32_bits(operation: str, name: str, x: np.ndarray | np.generic) -> None:
    """Raises for 64-bit integers of numpy that do not fit 32 bits, to which JAX would truncate them by default."""
    if x.dtype.kind not in "iu" or x.dtype.itemsize < 8 or jax.config.jax_enable_x64 or x.size == 0:
        return
    limits = np.iinfo(f"{x.dtype.kind.replace('i', 'int').replace('u', 'uint')}32")
    for extreme in (x.min(), x.max()):
        if not limits.min <= extreme <= limits.max:
            raise value_error(operation, f"{name} holds {extreme}, which is no number of 32 bits")


def int32(x: Any) -> Any:
    """Integers as int32; values outside its range saturate instead of wrapping around."""
    if jnp.iinfo(x.dtype).max <= 2**31 - 1:
        return x.astype(jnp.int32)
    least = 0 if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else -(2**31)
    return x.clip(least, 2**31 - 1).astype(jnp.int32)


def require_rank(operation: str, rank: int, axes: str, **arrays: Any) -> None:
    """Raises unless every array has `rank` axes."""
    for name, x in arrays.items():
        if len(x.shape) != rank:
            raise value_error(operation, f"{name} has {len(x.shape)} axes; it must have {rank}: {axes}", **arrays)


def require_dtype(operation: str, kind: Any, wanted: str, **arrays: Any) -> None:
    """Raises unless every array has a supported dtype of a kind: `np.floating`, `np.integer` or `np.bool_`."""
    for name, x in arrays.items():
        if x is None or x.dtype.name in _OF_KIND[kind]:
            continue
        known = f": {', '.join(_OF_KIND[kind])}" if jnp.issubdtype(x.dtype, kind) else ""
        raise type_error(operation, f"{name} has dtype {x.dtype}; it must be {wanted}{known}", **{name: x})


def require_cuts(operation: str, **arrays: Any) -> None:
    """Raises unless every array is a valid cu_seqlens: integers [sequences + 1], of a static number of sequences."""
    require_rank(operation, 1, "sequences + 1", **arrays)
    require_dtype(operation, np.integer, "an integer type", **arrays)
    for name, x in arrays.items():
        if is_symbolic(x):
            raise value_error(operation, f"{name} is symbolic; the number of sequences has to be known", **arrays)
        if x.shape[0] < 2:
            raise value_error(operation, f"{name} must have sequences + 1 ≥ 2 entries", **arrays)


def require_known(operation: str, what: str, size: Any, **arrays: Any) -> None:
    """Raises if a size that determines what is computed is symbolic."""
    if is_symbolic_dim(size):
        raise value_error(operation, f"{what} is symbolic, {size}; it has to be known", **arrays)


def require_same_dtype(operation: str, **arrays: Any) -> None:
    """Raises unless all arrays have the same dtype."""
    (first, x), *others = arrays.items()
    for name, y in others:
        if y.dtype != x.dtype:
            raise type_error(operation, f"{name} is {y.dtype} but {first} is {x.dtype}; they must be equal", **arrays)


def window_pair(operation: str, window: Any) -> tuple[int | None, int | None]:
    """The window as (left, right), both inclusive; an int w means the w keys that end with the query's own."""
    if window is None:
        return (None, None)
    if isinstance(window, int | np.integer) and not isinstance(window, bool):
        if window < 1:
            raise value_error(operation, f"window is {shown(window)}; a number of keys must be at least 1")
        return (int(window) - 1, 0)
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise type_error(operation, f"window is {shown(window)}; it must be an int, a pair (left, right) or None")
    for side, bound in zip(("left", "right"), window, strict=True):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | np.integer)):
            raise type_error(operation, f"window's {side} bound is {shown(bound)}; it must be an int or None")
        if bound is not None and bound < 0:
            raise value_error(operation, f"window's {side} bound is {shown(bound)}; it must not be negative")
    return tuple(None if bound is None else int(bound) for bound in window)


def static_number(operation: str, name: str, x: Any) -> float:
    """A number that is known at tracing time; raises if it is traced."""
    x = number_of(x)
    if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating):
        raise type_error(operation, f"{name} must be a static number, not {type(x).__name__}")
    try:
        return float(x)
    except OverflowError:  # an int beyond float64
        return np.inf if x > 0 else -np.inf


def static_int(operation: str, name: str, x: Any, least: int = 0) -> int:
    """An int that is known at tracing time, of at least `least` and of 32 bits."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise type_error(operation, f"{name} is {shown(x)}; it must be an int")
    if not least <= x <= LARGEST_SIZE:
        raise value_error(operation, f"{name} is {shown(x)}; it must be from {least} to 2**31 - 1")
    return int(x)


def static_scale(operation: str, x: Any, dtype: Any) -> float:
    """A static softmax_scale for logits of a dtype; its product with log₂ e, which kernels use, has to be finite."""
    scale, most = static_number(operation, "softmax_scale", x), float(np.finfo(dtype).max) / 2
    if not abs(scale) <= most:
        raise value_error(
            operation, f"softmax_scale is {scale}; it must be finite, and {most:.3g} at most: logits are {dtype}"
        )
    return scale


def positive_or_none(operation: str, name: str, x: Any) -> float | None:
    """A static positive number, or None."""
    if x is None:
        return None
    x = static_number(operation, name, x)
    if not np.isfinite(x) or x <= 0:
        raise value_error(operation, f"{name} is {x}; it must be positive and finite")
    return x


def static_bool(operation: str, name: str, x: Any) -> bool:
    """A bool that is known at tracing time; raises if it is traced."""
    if not isinstance(x, bool | np.bool_):
        raise type_error(operation, f"{name} must be True or False, not {type(x).__name__}")
    return bool(x)


def size_or_none(operation: str, name: str, x: Any, most: Any = None, *, least: int = 1) -> int | None:
    """A static size of at least 1, or None; a size above `most`, if that is given and static, becomes `most`.

    With `least=0`, a size of 0, as empty arrays have, is allowed and becomes 1.
    """
    if x is None:
        return None
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise type_error(operation, f"{name} must be an int or None, not {type(x).__name__}")
    if x < least:
        raise value_error(operation, f"{name} is {shown(x)}; it must be at least {least}")
    return max(1, int(x) if most is None or is_symbolic_dim(most) else min(int(x), most))


def size_of(operation: str, name: str, x: Any) -> int:
    """A static positive size."""
    found = size_or_none(operation, name, x)
    if found is None or found > LARGEST_SIZE:
        raise value_error(operation, f"{name} is {shown(x)}; it must be a positive int of 32 bits")
    return found


def block_pair(operation: str, block_size: Any) -> tuple[int, int]:
    """The numbers of queries and of keys in a block, static and positive."""
    if not isinstance(block_size, tuple | list) or len(block_size) != 2:
        raise type_error(
            operation, f"block_size is {shown(block_size)}; it must be a pair of ints, of queries and keys"
        )
    for of, size in zip(("queries", "keys"), block_size, strict=True):
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise type_error(operation, f"block_size has {shown(size)} {of}; it must be an int")
        if not 1 <= size <= LARGEST_SIZE:
            raise value_error(operation, f"block_size has {shown(size)} {of}; it must be a positive int of 32 bits")
    return tuple(map(int, block_size))


def axis_size(operation: str, axis_name: Any) -> int:
    """The number of devices along one or several mesh axes; raises unless these are manual here."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise type_error(operation, f"axis_name is {shown(axis_name)}; it must be the name of a mesh axis, or several")
    if len(set(names)) < len(names):  # XLA ends the process where a collective names an axis twice
        raise value_error(operation, f"axis_name is {shown(axis_name)}; it must name each mesh axis once")
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        raise value_error(
            operation, f"there is no axis {shown(axis_name)} here; call it inside jax.shard_map over that axis"
        ) from None


def align(primitive: KernelPrimitive, named: Mapping[str, Any]) -> dict[str, Any]:
    """The operands with one sharding for each axis name and the same varying manual axes, as a primitive needs them."""
    return aligned(primitive.name, primitive.table, primitive.layout, vary_alike(named))


def vary_alike(named: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays with the same varying manual axes.

    Under `shard_map`, an operand that does not vary over an axis over which others vary is cast to vary over it; the
    transpose of the cast sums the operand's gradient over that axis.
    """
    types = {name: jax.typeof(x) for name, x in named.items()}
    varying = frozenset().union(*(aval.manual_axis_type.varying for aval in types.values()))
    return {
        name: jax.lax.pcast(x, tuple(sorted(missing)), to="varying")
        if (missing := varying - types[name].manual_axis_type.varying)
        else x
        for name, x in named.items()
    }


def on_one_mesh(named: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, all brought to the Explicit mesh that one of them is on, as plain JAX needs it under `jax.vmap`.

    JAX finds no mesh for values that it maps over an Explicit axis if their type is that of an array without a mesh, as
    is the case for cotangents of such an array and for the result of a `select` with a mapped condition. The product
    with an array of ones is on the mesh, and so is its cotangent (seen on jax 0.11.2).
    """
    meshes = {name: jax.typeof(x).sharding.mesh for name, x in named.items()}
    placed = next((name for name, mesh in meshes.items() if explicit_axes_of(mesh)), None)
    others = [name for name, mesh in meshes.items() if placed and mesh != meshes[placed]]
    if not others:
        return dict(named)
    whole = lambda x: NamedSharding(meshes[placed], PartitionSpec(*[None] * x.ndim))
    ones = {name: jax.lax.full(named[name].shape, 1, named[name].dtype) for name in others}
    ones = resharded(named[placed], ones, tuple((name, whole(x)) for name, x in ones.items()))
    return {**named, **{name: jax.lax.mul(named[name], ones[name]) for name in others}}
