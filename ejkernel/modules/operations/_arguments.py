"""What the public functions of all operations do with their arguments before a primitive is bound.

Wrong arguments are told here, before anything is traced or compiled, in the grammar of `ejkernel.errors`.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.sharding import NamedSharding, PartitionSpec

from ...errors import shown, type_error, value_error
from ...primitives._factory import KernelPrimitive
from ...primitives._sharding import aligned, explicit_axes_of, resharded
from ...types import BwdParams, FwdParams, OperationConfig, Platform, checked_config
from ...types.config import LARGEST_SIZE
from ...xla_utils.symbolic import is_symbolic

# What is computed with; float8 is for matrices alone that say so, and the rest has no arithmetic or none of this kind.
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_OF_KIND = {np.floating: FLOATS, np.integer: INTEGERS, np.bool_: ("bool",)}


def array(operation: str, name: str, x: Any) -> Any:
    """An operand as an array, of JAX or numpy or something that says how it becomes one; never a list or a number."""
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
    """An operand that may be left out."""
    return None if x is None else array(operation, name, x)


def _require_32_bits(operation: str, name: str, x: np.ndarray | np.generic) -> None:
    """Integers of numpy are not cut off: JAX makes 64 bits to 32 unless it is told to keep them."""
    if x.dtype.kind not in "iu" or x.dtype.itemsize < 8 or jax.config.jax_enable_x64 or x.size == 0:
        return
    limits = np.iinfo(f"{x.dtype.kind.replace('i', 'int').replace('u', 'uint')}32")
    for extreme in (x.min(), x.max()):
        if not limits.min <= extreme <= limits.max:
            raise value_error(operation, f"{name} holds {extreme}, which is no number of 32 bits")


def int32(x: Any) -> Any:
    """Integers as int32; what that does not hold becomes the nearest that it does, and does not wrap around."""
    if jnp.iinfo(x.dtype).max <= 2**31 - 1:
        return x.astype(jnp.int32)
    least = 0 if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else -(2**31)
    return x.clip(least, 2**31 - 1).astype(jnp.int32)


def require_rank(operation: str, rank: int, axes: str, **arrays: Any) -> None:
    """Every array has that many axes."""
    for name, x in arrays.items():
        if len(x.shape) != rank:
            raise value_error(operation, f"{name} has {len(x.shape)} axes; it must have {rank}: {axes}", **arrays)


def require_dtype(operation: str, kind: Any, wanted: str, **arrays: Any) -> None:
    """Every array has a dtype of that kind: `np.floating`, `np.integer` or `np.bool_`, of those that are known."""
    for name, x in arrays.items():
        if x is None or x.dtype.name in _OF_KIND[kind]:
            continue
        known = f": {', '.join(_OF_KIND[kind])}" if jnp.issubdtype(x.dtype, kind) else ""
        raise type_error(operation, f"{name} has dtype {x.dtype}; it must be {wanted}{known}", **{name: x})


def require_cuts(operation: str, **arrays: Any) -> None:
    """Every array divides tokens into sequences, whose number is known: cu_seqlens, [sequences + 1] integers."""
    require_rank(operation, 1, "sequences + 1", **arrays)
    require_dtype(operation, np.integer, "an integer type", **arrays)
    for name, x in arrays.items():
        if is_symbolic(x):
            raise value_error(operation, f"{name} is symbolic; the number of sequences has to be known", **arrays)
        if x.shape[0] < 2:
            raise value_error(operation, f"{name} must have sequences + 1 ≥ 2 entries", **arrays)


def require_known(operation: str, what: str, size: Any, **arrays: Any) -> None:
    """A size that what is computed depends on is no symbolic one."""
    if is_symbolic_dim(size):
        raise value_error(operation, f"{what} is symbolic, {size}; it has to be known", **arrays)


def require_same_dtype(operation: str, **arrays: Any) -> None:
    """All arrays have one dtype."""
    (first, x), *others = arrays.items()
    for name, y in others:
        if y.dtype != x.dtype:
            raise type_error(operation, f"{name} is {y.dtype} but {first} is {x.dtype}; they must be equal", **arrays)


def window_pair(operation: str, window: Any) -> tuple[int | None, int | None]:
    """(left, right), both inclusive; an int w is w keys that end with the query's own."""
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
    left, right = (None if bound is None else int(bound) for bound in window)
    return (left, right)


def static_number(operation: str, name: str, x: Any) -> float:
    """A number that is known when a program is traced."""
    if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating):
        raise type_error(operation, f"{name} must be a static number, not {type(x).__name__}")
    try:
        return float(x)
    except OverflowError:  # an int beyond float64
        return np.inf if x > 0 else -np.inf


def static_scale(operation: str, x: Any, dtype: Any) -> float:
    """A static softmax_scale for logits of that dtype. Kernels multiply it by log₂ e, which has to be finite, too."""
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
    """True or False, known when a program is traced."""
    if not isinstance(x, bool | np.bool_):
        raise type_error(operation, f"{name} must be True or False, not {type(x).__name__}")
    return bool(x)


def size_or_none(operation: str, name: str, x: Any, most: Any = None, *, least: int = 1) -> int | None:
    """A static size of at least 1, or None; what is above `most`, if that is given and known, is that.

    With `least=0`, 0 is taken for 1: of what an empty array has none.
    """
    if x is None:
        return None
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise type_error(operation, f"{name} must be an int or None, not {type(x).__name__}")
    if x < least:
        raise value_error(operation, f"{name} is {shown(x)}; it must be at least {least}")
    return max(1, int(x) if most is None or is_symbolic_dim(most) else min(int(x), most))


def platform_of(operation: str, platform: Platform | str | None) -> Platform | str:
    """The platform that a user asks for; "auto" where any will do."""
    if platform is not None and (not isinstance(platform, str) or platform not in ("auto", *Platform)):
        raise value_error(operation, f"platform {shown(platform)} is unknown; known are auto, {', '.join(Platform)}")
    return platform or "auto"


def config_of(
    operation: str, config: Any, of: type[OperationConfig]
) -> OperationConfig | tuple[OperationConfig, OperationConfig] | None:
    """A config given by a user, or the pair of those of the forward and of the backward; None if none is given."""
    if config is None:
        return None
    if isinstance(config, tuple):
        if len(config) != 2:
            raise value_error(operation, f"config is a tuple of {len(config)}; a pair is (forward, backward)")
        return tuple(_one_config(operation, one, of) for one in config)
    return _one_config(operation, config, of)


def _one_config(operation: str, config: Any, of: type[OperationConfig]) -> OperationConfig:
    """A config, from one, from a mapping of its fields, or from the short forms of a `KernelConfig`."""
    known = {field.name for field in fields(of)}
    if isinstance(config, Mapping):
        if unknown := sorted(map(str, config.keys() - known)):
            raise value_error(operation, f"config has no field {', '.join(unknown)}; the fields are {sorted(known)}")
        config = of(**config)
    elif not isinstance(config, OperationConfig | FwdParams | BwdParams):
        raise type_error(operation, f"config is a {type(config).__name__}; it must be a {of.__name__} or a mapping")
    return checked_config(operation, config, of)


def block_pair(operation: str, block_size: Any) -> tuple[int, int]:
    """Queries and keys of a block, static and positive."""
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
    """The number of devices of a mesh axis, or of several, which has to be manual here."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise type_error(operation, f"axis_name is {shown(axis_name)}; it must be the name of a mesh axis, or several")
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        raise value_error(
            operation, f"there is no axis {shown(axis_name)} here; call it inside jax.shard_map over that axis"
        ) from None


def align(primitive: KernelPrimitive, named: Mapping[str, Any]) -> dict[str, Any]:
    """Operands with one sharding for each axis and the same varying manual axes, as the primitive needs them."""
    return aligned(primitive.name, primitive.table, primitive.layout, vary_alike(named))


def vary_alike(named: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays with the same varying manual axes.

    Under `shard_map` an operand that does not vary over an axis that others vary over is cast to do so, whose transpose
    sums its gradient.
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
    """Arrays all on the mesh of Explicit axes that one of them is on, as plain JAX needs them under `jax.vmap`.

    JAX finds no mesh for what it maps over an Explicit axis, but which has the type of an array of no mesh: cotangents
    of such an array, and what is selected by a mapped condition. As a product with ones an array is on the mesh, and
    its cotangent is one again (seen on jax 0.11.2).
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
