"""The arguments of a call as JSON and back: trees of array types and static options.

Of an array, the type and sharding are packed, not the values:

    {"array": {"shape": [8, 4], "dtype": "bfloat16", "mesh": {"x": 2}, "spec": ["x", null]}}
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ejkernel.errors import a_type, shown

from .operands import abstract, is_array
from .serialization import class_name, class_named, is_packable, pack, unpack

_KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


def pack_tree(tree: Any) -> Any:
    """Tuples, lists and dicts of arrays, numbers, strings, dtypes, types and frozen dataclasses, ready for JSON.

    Raises:
        TypeError: it holds something else.
    """
    if is_array(tree):
        return {"array": _pack_array(abstract(tree))}
    if type(tree) is tuple:
        return {"tuple": [pack_tree(x) for x in tree]}
    if type(tree) is list:
        return [pack_tree(x) for x in tree]
    if type(tree) is dict and all(isinstance(name, str) for name in tree):
        return {"dict": {name: pack_tree(x) for name, x in tree.items()}}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, np.dtype):
        return {"dtype": tree.name}
    if isinstance(tree, type) and class_named(class_name(tree)) is tree:  # as jnp.float32
        return {"type": class_name(tree)}
    if is_packable(tree):
        return pack(tree)
    raise TypeError(f"{shown(tree)} is {a_type(tree)}, which cannot be written as JSON")


def unpack_tree(packed: Any) -> Any:
    """The tree that was packed, with a `jax.ShapeDtypeStruct` for each array.

    Raises:
        ValueError: it was not made by `pack_tree`, or has a class that this process has not imported.
    """
    if isinstance(packed, list):
        return [unpack_tree(x) for x in packed]
    if not isinstance(packed, dict):
        return packed
    if "class" in packed:
        if (found := unpack(packed)) is None:
            raise ValueError(f"{packed['class']} is not imported, or no frozen dataclass")
        return found
    match packed:
        case {"array": dict(described)}:
            return _unpack_array(**described)
        case {"tuple": list(items)}:
            return tuple(map(unpack_tree, items))
        case {"dict": dict(items)}:
            return {name: unpack_tree(x) for name, x in items.items()}
        case {"dtype": str(name)}:
            return np.dtype(name)
        case {"type": str(name)}:
            if (found := class_named(name)) is None:
                raise ValueError(f"{name} is not imported")
            return found
    raise ValueError(f"nothing that was packed: {packed!r:.80}")


def _pack_array(x: jax.ShapeDtypeStruct) -> dict[str, Any]:
    described = {"shape": list(x.shape), "dtype": x.dtype.name}
    if x.weak_type:
        described["weak_type"] = True
    if x.sharding is not None:
        described |= {"mesh": dict(x.sharding.mesh.shape), "spec": list(x.sharding.spec)}
    return described


def _unpack_array(shape, dtype, weak_type=False, mesh=None, spec=None) -> jax.ShapeDtypeStruct:
    sharding = None
    if mesh is not None:
        axes = PartitionSpec(*(tuple(axis) if isinstance(axis, list) else axis for axis in spec))
        sharding = NamedSharding(AbstractMesh(tuple(mesh.values()), tuple(mesh)), axes)
    return jax.ShapeDtypeStruct(tuple(shape), _dtype(dtype), weak_type=weak_type, sharding=sharding)


def _dtype(name: str) -> Any:
    for algorithm in _KEYS if name.startswith("key<") else ():
        key = jax.eval_shape(lambda: jax.random.key(0, impl=algorithm))  # noqa: B023
        if key.dtype.name == name:
            return key.dtype
    return np.dtype(name)
