"""The referee: the formula of attention, and distances to a formula in float64.

The error of a result is its relative distance to the formula in float64, in units of the distance of the formula in the
dtype of the inputs; the largest of all results counts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ._contenders import Inputs, call
from ._harness import Check

Formula = Callable[[Any], Sequence[Any]]
"""A function from a dtype to the results computed in it."""


def check(parts: Callable[[Sequence[Any]], Sequence[Any]], formula: Formula, dtype: Any) -> Check:
    """Judges `parts` of the results by their distance to `formula(float64)`, in units of that of `formula(dtype)`."""
    # A TPU has no float64.
    with jax.default_device(jax.devices("cpu")[0] if jax.default_backend() == "tpu" else None):
        rounded = list(map(_numbers, formula(np.dtype(dtype))))
        with jax.enable_x64(True):
            exact = list(map(_numbers, formula(np.dtype(np.float64))))
    units = [_distance(x, y) for x, y in zip(rounded, exact, strict=True)]

    def error(results: Sequence[Any]) -> float:
        found = [_distance(_numbers(x), y) for x, y in zip(parts(results), exact, strict=True)]
        return float(np.max(np.divide(found, np.maximum(units, 1e-12))))  # NaN if one is

    return error


def check_by_rounding(parts: Callable[[Sequence[Any]], Sequence[Any]], formula: Formula, dtype: Any) -> Check:
    """Judges `parts` of the results by their distance to `formula(float64)`, in units of that of a rounded float32.

    That is `formula(float32)`, rounded to `dtype`: what a kernel errs that rounds nothing but its results.
    """

    def rounded(wanted: Any) -> Sequence[Any]:
        if wanted == np.float64:
            return formula(wanted)
        return [jnp.asarray(x, dtype) for x in formula(np.dtype(np.float32))]

    return check(parts, rounded, dtype)


def check_of_a_head(mode: str, given: Inputs, kv_heads: int, attention: Callable[..., Array]) -> Check:
    """Judges a call of attention at its full size, in the first sequence and key/value head with all of its queries.

    `attention(q, k, v)` is the formula for them, q [s,h,d], k [t,1,d] and v [t,1,e].
    """
    part = lambda x: x[0, :, : x.shape[2] // kv_heads]
    arrays = (tuple(map(part, given.operands)), tuple(map(part, given.tangents)), part(given.cotangent))

    def formula(dtype: Any) -> tuple:
        return jax.jit(call(attention, mode))(*jax.tree.map(lambda x: jnp.asarray(x, dtype), arrays))

    return check(lambda results: list(map(part, results)), formula, given.cotangent.dtype)


def attention(
    q: Array,
    k: Array,
    v: Array,
    visible: Callable[[Array], Array],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """softmax(q kᵀ) v of one key/value head and its queries, q [s,h,d], k [t,d], v [t,e], in memory linear in s.

    `visible(i)` says which keys query i sees, [t]. Products are in the dtype of the inputs, all else in float32, or in
    float64 where the inputs are.
    """
    dtype, wide = q.dtype, jnp.promote_types(q.dtype, jnp.float32)
    k, v = k.astype(wide), v.astype(wide)  # so that their gradients are summed in `wide`

    @jax.checkpoint
    def row(q: Array, i: Array) -> Array:
        s = jnp.einsum("hd,td->ht", q, k.astype(dtype), preferred_element_type=wide) * scale
        if softcap:
            s = softcap * jnp.tanh(s / softcap)
        s = jnp.where(visible(i), s, -jnp.inf)
        if sinks is not None:
            s = jnp.concatenate([s, sinks.astype(wide)], -1)
        p = jax.nn.softmax(s, -1)[:, : k.shape[0]].astype(dtype)
        return jnp.einsum("ht,te->he", p, v.astype(dtype), preferred_element_type=wide).astype(dtype)

    return jax.lax.map(lambda x: row(*x), (q, jnp.arange(q.shape[0])), batch_size=128)


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30))


def _numbers(x: Any) -> np.ndarray:
    """An array of JAX or of torch as float64 numbers of the host."""
    return x.detach().double().cpu().numpy() if hasattr(x, "detach") else np.asarray(x).astype(np.float64)
