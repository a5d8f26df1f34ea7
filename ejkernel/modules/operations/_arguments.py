"""What the public faces of all operations do with their arguments before a primitive is bound.

Wrong arguments are told here, before anything is traced or compiled, in the grammar of `ejkernel.errors`.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import shown, type_error, value_error
from ...primitives._factory import KernelPrimitive
from ...primitives._sharding import aligned
from ...types import KernelConfig, Platform, checked_config
from ...xla_utils.symbolic import is_symbolic


def array(operation: str, name: str, x: Any) -> Any:
    """An operand as an array; raises for what has no shape and dtype."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise type_error(operation, f"{name} must be an array, not {type(x).__name__}")
    return jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x


def require_rank(operation: str, rank: int, axes: str, **arrays: Any) -> None:
    """Every array has that many axes."""
    for name, x in arrays.items():
        if len(x.shape) != rank:
            raise value_error(operation, f"{name} has {len(x.shape)} axes; it must have {rank}: {axes}", **arrays)


def require_dtype(operation: str, kind: Any, wanted: str, **arrays: Any) -> None:
    """Every array has a dtype of that kind (as in `jax.numpy.issubdtype`)."""
    for name, x in arrays.items():
        if x is not None and not jnp.issubdtype(x.dtype, kind):
            raise type_error(operation, f"{name} has dtype {x.dtype}; it must be {wanted}", **{name: x})


def require_cuts(operation: str, **arrays: Any) -> None:
    """Every array divides tokens into sequences, whose number is known: cu_seqlens, [sequences + 1] integers."""
    require_rank(operation, 1, "sequences + 1", **arrays)
    require_dtype(operation, np.integer, "an integer type", **arrays)
    for name, x in arrays.items():
        if is_symbolic(x):
            raise value_error(operation, f"{name} is symbolic; the number of sequences has to be known", **arrays)
        if x.shape[0] < 2:
            raise value_error(operation, f"{name} must have sequences + 1 ≥ 2 entries", **arrays)


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
            raise value_error(operation, f"window is {window}; a number of keys must be at least 1")
        return (int(window) - 1, 0)
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise type_error(operation, f"window is {window!r}; it must be an int, a pair (left, right) or None")
    for side, bound in zip(("left", "right"), window, strict=True):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | np.integer)):
            raise type_error(operation, f"window's {side} bound is {bound!r}; it must be an int or None")
        if bound is not None and bound < 0:
            raise value_error(operation, f"window's {side} bound is {bound}; it must not be negative")
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


def size_or_none(operation: str, name: str, x: Any) -> int | None:
    """A static size of at least 1, or None."""
    if x is None:
        return None
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise type_error(operation, f"{name} must be an int or None, not {type(x).__name__}")
    if x < 1:
        raise value_error(operation, f"{name} is {x}; it must be at least 1")
    return int(x)


def config_of(operation: str, config: Any, platform: Platform | str | None = None) -> KernelConfig | None:
    """A config given by a user, as a `KernelConfig` or a mapping of its fields; None if none is given."""
    known = {field.name for field in fields(KernelConfig)}
    if isinstance(config, Mapping):
        if unknown := sorted(map(str, config.keys() - known)):
            raise value_error(operation, f"config has no field {', '.join(unknown)}; the fields are {sorted(known)}")
        config = KernelConfig(**config)
    elif config is not None and not isinstance(config, KernelConfig):
        raise type_error(operation, f"config is a {type(config).__name__}; it must be a KernelConfig or a mapping")
    if platform is not None and (not isinstance(platform, str) or platform not in ("auto", *Platform)):
        raise value_error(operation, f"platform {shown(platform)} is unknown; known are auto, {', '.join(Platform)}")
    return None if config is None else checked_config(operation, config)


def align(primitive: KernelPrimitive, named: Mapping[str, Any]) -> dict[str, Any]:
    """Operands with one sharding for each axis and the same varying manual axes, as the primitive needs them.

    Under `shard_map` an operand that does not vary over an axis that others vary over is cast to do so, whose transpose
    sums its gradient.
    """
    types = {name: jax.typeof(x) for name, x in named.items()}
    varying = frozenset().union(*(aval.manual_axis_type.varying for aval in types.values()))
    if varying:
        named = {
            name: jax.lax.pcast(x, tuple(sorted(missing)), to="varying")
            if (missing := varying - types[name].manual_axis_type.varying)
            else x
            for name, x in named.items()
        }
    return aligned(primitive.name, primitive.table, primitive.layout, named)
