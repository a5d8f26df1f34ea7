"""What benchmarks of attention share: the work of a call, the formula as referee, and inputs.

FLOPs of the forward: 4·B·H·Sq·Sk·D, that is 2·(D + V) for each pair of query and key; half of it when causal, the exact
number of pairs with a window. The backward counts 2.5 times that (five products against two, one of them recomputed),
forward and backward 3.5 times, a JVP 2.5 times, whatever a contender computes beyond it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.types import AttentionShape

WORK = {"fwd": 1.0, "bwd": 2.5, "fwd_bwd": 3.5, "jvp": 2.5}
CONVENTION = "forward 4·B·H·Sq·Sk·D, halved when causal, windows exactly; bwd 2.5 ×, fwd_bwd 3.5 ×, jvp 2.5 ×"


def operations(shape: AttentionShape, mode: str) -> float:
    """FLOPs of a call by the convention above."""
    square = shape.seq_q * shape.seq_k
    if shape.window == (None, None) and shape.seq_q == shape.seq_k:
        pairs = square / 2 if shape.causal else square
    else:
        pairs = shape.pairs
    return WORK[mode] * shape.batch * shape.heads * pairs * 2 * (shape.head_dim + shape.value_dim)


@dataclass(frozen=True)
class Inputs:
    """Random arrays of one case: operands, their tangents, the cotangent of o, and sinks where the shape has them."""

    operands: tuple[Array, Array, Array]
    tangents: tuple[Array, Array, Array]
    cotangent: Array
    sinks: Array | None


def inputs(shape: AttentionShape, dtype: Any) -> Inputs:
    """Standard normal arrays."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda size, dtype=dtype: jax.random.normal(next(keys), size, jnp.float32).astype(dtype)
    sizes = shape.sizes
    operands, tangents = (tuple(normal(sizes[name]) for name in "qkv") for _ in range(2))
    cotangent = normal((*sizes["q"][:3], shape.value_dim))
    return Inputs(operands, tangents, cotangent, normal(sizes["sinks"], jnp.float32) if shape.sinks else None)


def call(attention: Callable[..., Array], mode: str) -> Callable[..., tuple]:
    """From attention(q, k, v) to a function of (operands, tangents, cotangent): the results of a mode."""

    def bwd(x, dx, do):
        return jax.vjp(attention, *x)[1](do)

    def fwd_bwd(x, dx, do):
        o, pull = jax.vjp(attention, *x)
        return (o, *pull(do))

    return {
        "fwd": lambda x, dx, do: (attention(*x),),
        "bwd": bwd,
        "fwd_bwd": fwd_bwd,
        "jvp": lambda x, dx, do: jax.jvp(attention, x, dx),
    }[mode]


# --- The referee


def gate(shape: AttentionShape, mode: str, given: Inputs) -> Callable[[Sequence[Any]], float]:
    """Judges a call at its full size, in the first sequence and the first key/value head with all of its queries.

    The error of a result is its relative distance to the formula in float64; the unit, that of the formula in the dtype
    of the inputs; the worst of all results counts.
    """
    part = lambda x: x[0, :, : x.shape[2] // shape.kv_heads]
    arrays = (tuple(map(part, given.operands)), tuple(map(part, given.tangents)), part(given.cotangent))
    sinks = None if given.sinks is None else given.sinks[: shape.heads // shape.kv_heads]

    def judged(dtype: Any) -> list[np.ndarray]:
        x, dx, do = jax.tree.map(lambda x: jnp.asarray(x, dtype), arrays)
        formula = lambda q, k, v: attention_of_a_head(shape, q, k, v, sinks)
        return [_numbers(x) for x in jax.jit(call(formula, mode))(x, dx, do)]

    # A TPU has no float64.
    with jax.default_device(jax.devices("cpu")[0] if jax.default_backend() == "tpu" else None):
        rounded = judged(given.cotangent.dtype)
        with jax.enable_x64(True):
            exact = judged(jnp.float64)
    units = [_distance(x, y) for x, y in zip(rounded, exact, strict=True)]

    def error(results: Sequence[Any]) -> float:
        found = [_distance(_numbers(part(x)), y) for x, y in zip(results, exact, strict=True)]
        return float(np.max(np.divide(found, units)))  # NaN where one is

    return error


def attention_of_a_head(shape: AttentionShape, q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
    """The formula for one key/value head and its queries, q [s,h,d], k [t,1,d], v [t,1,e], in memory linear in s.

    Products in the dtype of the inputs, all else in float32, or in float64 where the inputs are.
    """
    dtype, wide = q.dtype, jnp.promote_types(q.dtype, jnp.float32)
    k, v = k[:, 0].astype(wide), v[:, 0].astype(wide)  # so that their gradients are summed in `wide`
    columns = jnp.arange(shape.seq_k)
    left, right = (shape.seq_k if bound is None else bound for bound in shape.window)

    @jax.checkpoint
    def row(q, position):
        s = jnp.einsum("hd,td->ht", q, k.astype(dtype), preferred_element_type=wide) * shape.head_dim**-0.5
        if shape.softcap:
            s = shape.softcap * jnp.tanh(s / shape.softcap)
        visible = (columns >= position - left) & (columns <= position + (min(right, 0) if shape.causal else right))
        s = jnp.where(visible, s, -jnp.inf)
        if sinks is not None:
            s = jnp.concatenate([s, sinks.astype(wide)], -1)
        p = jax.nn.softmax(s, -1)[:, : shape.seq_k].astype(dtype)
        return jnp.einsum("ht,te->he", p, v.astype(dtype), preferred_element_type=wide).astype(dtype)

    position = jnp.arange(shape.seq_q) + shape.seq_k - shape.seq_q
    return jax.lax.map(lambda x: row(*x), (q, position), batch_size=128)


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def _numbers(x: Any) -> np.ndarray:
    """An array of JAX or of torch as float64 numbers of the host."""
    return x.detach().double().cpu().numpy() if hasattr(x, "detach") else np.asarray(x).astype(np.float64)
