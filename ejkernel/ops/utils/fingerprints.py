"""The key under which the config of a call is stored, and the fingerprints in it.

    matmul@v1|((f32[4,4]@x=2;P('x', None), f32[4,4]), {'fast': true})|cuda (NVIDIA H200)|source 0f3c…|jax 0.11.2, …

A key describes structure, never values. It has everything that a measured config depends on: the operation, the types
and shardings of its operands, its options, the device, the source of its implementation, and the versions of the
packages that compile it. Every eager call needs a key, so its parts are cached.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import marshal
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ejkernel.errors import short_type
from ejkernel.types import Target

from .devices import local_target
from .operands import is_array, sharding_of
from .serialization import stable_json


def default_key_builder_with_sharding(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The key of `kernel(*args, **kwargs)` on the device in use: equal in every process."""
    inv, _ = kernel.prepare(tuple(args), dict(kwargs))
    return key_of(inv.kernel, inv.args, inv.kwargs, inv.target)


def key_of(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], target: Target | None = None) -> str:
    """The key of a call whose arguments are prepared, on `target` (by default the device in use)."""
    target = target or local_target()
    return "|".join(
        (
            kernel.op_id,
            structure_fingerprint((tuple(args), dict(kwargs))),
            _target_text(target),
            f"source {kernel.source_fingerprint(target)}",
            versions_fingerprint(),
        )
    )


def call_of(key: str) -> str:
    """The part of a key without source and versions: operation, operands, options and device."""
    return key.rsplit("|", 2)[0]


# --- Operands


def structure_fingerprint(tree: Any) -> str:
    """The tree with each array as its type and sharding, `f32[4,4]@x=2;P('x')`, and every other leaf as JSON."""
    leaves, structure = jax.tree.flatten(tree)
    leaves = tuple([_Array(x.shape, x.dtype, sharding_of(x)) if is_array(x) else (type(x), x) for x in leaves])
    try:
        return _remembered_structure(structure, leaves)
    except TypeError:  # a leaf is not hashable
        return _structure_text(structure, leaves)


class _Array(NamedTuple):
    """The properties of an array that are part of a key."""

    shape: tuple
    dtype: Any
    sharding: jax.sharding.Sharding


def _structure_text(structure: Any, leaves: Sequence[_Array | tuple[type, Any]]) -> str:
    told = [_array_text(*leaf) if isinstance(leaf, _Array) else _leaf_text(leaf[1]) for leaf in leaves]
    text, *between = str(structure).removeprefix("PyTreeDef(").removesuffix(")").split("*")
    if len(between) != len(told):  # there is a "*" in a name
        return f"{structure}: {', '.join(told)}"
    return text + "".join(leaf + after for leaf, after in zip(told, between, strict=True))


_remembered_structure = functools.lru_cache(maxsize=4096)(_structure_text)


def _leaf_text(x: Any) -> str:
    try:
        return stable_json(x)
    except TypeError:  # no JSON
        return f"<{type(x).__qualname__}>"


def _array_text(shape: tuple, dtype: Any, sharding: jax.sharding.Sharding) -> str:
    array = jax.ShapeDtypeStruct(shape, dtype)
    layout = _sharding_text(sharding, array.ndim)
    return short_type(array) if layout == "unsharded" else f"{short_type(array)}@{layout}"


def sharding_fingerprint(x: Any) -> str:
    """How an array (concrete, abstract or traced) is laid out: `x=2;P(None, 'x')`, or "unsharded".

    Of the mesh it has only the axes that the layout uses and their sizes, no devices. Manual axes are left out: under
    `shard_map` the layout is that of the array inside.
    """
    return _sharding_text(sharding_of(x), np.ndim(x))


def _sharding_text(sharding: jax.sharding.Sharding, ndim: int) -> str:
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return "unsharded" if sharding.is_fully_replicated else f"{sharding.num_devices} devices"
    spec = tuple(sharding.spec) + (None,) * (ndim - len(sharding.spec))
    used = [axis for axes in spec for axis in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(axis, str)]
    sizes = ",".join(f"{axis}={sharding.mesh.shape[axis]}" for axis in used)
    return f"{sizes};P{spec}" if used else "unsharded"


_target_text = functools.cache(str)


# --- Source and versions


@functools.cache
def source_fingerprint(*sources: type | types.FunctionType | types.ModuleType) -> str:
    """A hash of the source of classes, functions or modules; of the bytecode where there is no source file."""
    digest = hashlib.sha256()
    for source in sources:
        try:
            digest.update(inspect.getsource(source).encode())
        except (OSError, TypeError):
            for _, function in sorted(vars(source).items()) if isinstance(source, type) else [("", source)]:
                if isinstance(function, types.FunctionType):
                    digest.update(marshal.dumps(function.__code__, 2))  # format 2: the same bytes always
    return digest.hexdigest()[:16]


@functools.cache
def versions_fingerprint() -> str:
    """As "jax 0.11.2, jaxlib 0.11.2, triton 3.6.0, jax-triton 0.4.1"; a package that is not installed is left out.

    Without jax-triton a call has no Triton kernels to choose from.
    """
    found = []
    for package in ("jax", "jaxlib", "triton", "jax-triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(found)
