"""The operands of a call: which are arrays, their shardings, their types, and random values for them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)
# The types of most options; `isinstance` with the types above takes a microsecond for each.
_PLAIN = {bool, int, float, str, tuple, type(None)}


def is_array(x: Any) -> bool:
    """Arrays of JAX and numpy, tracers, and `jax.ShapeDtypeStruct`; not Python's numbers."""
    return type(x) not in _PLAIN and isinstance(x, _ARRAYS)


def is_traced(x: Any) -> bool:
    """Whether `jax.jit` traces an argument of a program: an array, but no number of numpy, as options may be."""
    return is_array(x) and not isinstance(number_of(x), np.generic)


def number_of(x: Any) -> Any:
    """An array of numpy of rank 0, such as an arithmetic result, as the number that it holds; else x."""
    return x[()] if isinstance(x, np.ndarray) and x.ndim == 0 else x


def lacks_values(x: Any) -> bool:
    """A tracer or a `jax.ShapeDtypeStruct`."""
    return isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct)


def sharding_of(x: Any) -> jax.sharding.Sharding:
    """The sharding of an array; of a tracer, that of its type."""
    # The type of a concrete array lacks its sharding over Auto axes; a tracer has only its type.
    if isinstance(x, jax.core.Tracer) or (sharding := getattr(x, "sharding", None)) is None:
        return jax.typeof(x).sharding
    return sharding


def abstract(tree: Any) -> Any:
    """The tree with a `jax.ShapeDtypeStruct` instead of each array."""
    return jax.tree.map(lambda x: _abstract(x) if is_array(x) else x, tree)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    aval, sharding = jax.typeof(x), sharding_of(x)
    laid_out = isinstance(sharding, jax.sharding.NamedSharding) and any(sharding.spec)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding if laid_out else None
    )


def random_like(tree: Any) -> Any:
    """The tree with random values for every array that has none; arrays that have values, and other leaves, stay.

    Standard normal numbers; random bits for booleans, unsigned integers and keys; and integers from {0, 1}, which are
    valid as any index. Never all zeros, with which a device computes faster. For an array that is sharded over a mesh
    it makes the shard of one device.
    """
    leaves, structure = jax.tree.flatten(tree)
    filled = [_random(x, jax.random.key(i)) if lacks_values(x) else x for i, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, filled)


def random_types_like(tree: Any) -> Any:
    """The types of `random_like`: the tree with a `jax.ShapeDtypeStruct` for each array that has no values."""
    type_of = lambda x: jax.ShapeDtypeStruct(sharding_of(x).shard_shape(x.shape), x.dtype)
    return jax.tree.map(lambda x: type_of(x) if lacks_values(x) else x, tree)


def may_stand_for(values: Any, types: Any) -> bool:
    """Whether a program compiled for `types`, made by `random_types_like`, can run on `values`."""
    leaves, structure = jax.tree.flatten(values)
    expected, same = jax.tree.flatten(types)
    return structure == same and all(map(_may_stand_for, leaves, expected))


def _may_stand_for(x: Any, expected: Any) -> bool:
    if x is expected:
        return True
    if not (is_array(x) and is_array(expected)):
        return type(x) is type(expected) and x == expected
    if (x.shape, x.dtype) != (expected.shape, expected.dtype):
        return False
    return not getattr(x, "committed", False) or getattr(expected, "sharding", None) == x.sharding


def _random(x: Any, key: jax.Array) -> jax.Array:
    dtype, shape = x.dtype, sharding_of(x).shard_shape(x.shape)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(key, shape)
    if jnp.issubdtype(dtype, jnp.inexact):
        wide = dtype if dtype in (jnp.float64, jnp.complex64, jnp.complex128) else jnp.float32
        return jax.random.normal(key, shape, wide).astype(dtype)
    if dtype == jnp.bool_:
        return jax.random.bernoulli(key, shape=shape)
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return jax.random.bits(key, shape).astype(dtype)
    return jax.random.randint(key, shape, 0, 2).astype(dtype)
