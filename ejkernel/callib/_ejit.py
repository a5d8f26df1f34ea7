"""`ejit`: `jax.jit` under the name by which models call it, with or without options."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


def ejit(func: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """`jax.jit(func, **options)`; without `func`, a decorator with these options: `@ejit(static_argnums=0)`.

    Compiled programs are kept by JAX: set `jax_compilation_cache_dir` to keep them on disk.
    """
    if func is None:
        return lambda func: jax.jit(func, **options)
    return jax.jit(func, **options)


def _get_args_signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """A text that is equal for arguments of equal structure, shapes, dtypes and shardings."""
    leaves, structure = jax.tree.flatten((args, dict(kwargs)))
    return f"{structure}: {[_signature(leaf) for leaf in leaves]}"


def _signature(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return type(leaf).__name__
    return (leaf.shape, str(jax.dtypes.canonicalize_dtype(leaf.dtype)), repr(getattr(leaf, "sharding", None)))
