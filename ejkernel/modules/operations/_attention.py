"""Checks of the arguments of attention, and the canonical forms of windows, softcaps and segment ids."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import shown, type_error, value_error
from ...primitives.flash_attention import Operands, Outputs
from ...xla_utils.symbolic import is_symbolic
from ._arguments import (
    array,
    array_or_none,
    int32,
    positive_or_none,
    require_cuts,
    require_dtype,
    require_known,
    require_rank,
    require_same_dtype,
    size_or_none,
    static_bool,
    static_scale,
    window_pair,
)
from ._dropout import dropout_words

# For symbolic lengths, bounds of a window from here on are unbounded. A position plus this still fits an int32.
FAR = 2**30
# Softcaps below the first make all logits 0 to a softmax. Softcaps above the second change nothing: logits up to 2³⁰
# stay the same even in float64.
LEAST_SOFTCAP, MOST_SOFTCAP = 2.0**-60, 2.0**60


def attention_call(operation: str, given: Operands, **options: Any) -> tuple[Operands, dict[str, Any]]:
    """The checked operands and the spec's fields of a call of attention, from the arguments of the public function.

    The operands `given` are in the user's form: the scale may be static, dropout is a key, packed arrays have no batch.
    """
    q, k, v = (array(operation, name, getattr(given, name)) for name in ("q", "k", "v"))
    cu_seqlens_q = array_or_none(operation, "cu_seqlens_q", given.cu_seqlens_q)
    cu_seqlens_k = array_or_none(operation, "cu_seqlens_k", given.cu_seqlens_k)
    max_seqlen_q, max_seqlen_k = options["max_seqlen_q"], options["max_seqlen_k"]
    q_segment_ids, kv_segment_ids = given.q_segment_ids, given.kv_segment_ids
    packed = _is_packed(operation, q, k, v, cu_seqlens_q, cu_seqlens_k)
    if packed:
        _check_packed(operation, cu_seqlens_q, cu_seqlens_k, q_segment_ids, kv_segment_ids)
        q, k, v = q[None], k[None], v[None]
    elif max_seqlen_q is not None or max_seqlen_k is not None:
        raise value_error(operation, "max_seqlen_q and max_seqlen_k are for packed sequences: give cu_seqlens_q and _k")
    _check_arrays(operation, q, k, v)
    if (q_segment_ids is None) != (kv_segment_ids is None):
        alone, other = ("q", "kv") if kv_segment_ids is None else ("kv", "q")
        raise value_error(operation, f"{alone}_segment_ids is given without {other}_segment_ids; both or neither")
    scale, traced_scale = _scale(operation, given.softmax_scale, q)
    q_segment_ids, kv_segment_ids = segment_ids(operation, q_segment_ids, kv_segment_ids, q, k)
    operands = Operands(
        q,
        k,
        v,
        bias=pairwise(operation, "bias", given.bias, np.floating, "a float type", q, k),
        mask=pairwise(operation, "mask", given.mask, np.bool_, "bool", q, k),
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        sinks=sinks_of_heads(operation, given.sinks, q.shape[2], q),
        softmax_scale=traced_scale,
        cu_seqlens_q=int32(cu_seqlens_q)[None] if packed else None,
        cu_seqlens_k=int32(cu_seqlens_k)[None] if packed else None,
        dropout=dropout_words(operation, options["dropout_rate"], given.dropout, q),
    )
    return operands, dict(
        causal=static_bool(operation, "causal", options["causal"]),
        window=window_within(operation, options["window"], q, k),
        softcap=softcap_for(operation, options["softcap"], q),
        softmax_scale=scale,
        dropout_rate=float(options["dropout_rate"]),
        max_seqlen_q=size_or_none(operation, "max_seqlen_q", max_seqlen_q, q.shape[1], least=0),
        max_seqlen_k=size_or_none(operation, "max_seqlen_k", max_seqlen_k, k.shape[1], least=0),
        deterministic=static_bool(operation, "deterministic", options["deterministic"]),
        batch_invariant=static_bool(operation, "batch_invariant", options["batch_invariant"]),
        precision=_precision(operation, options["precision"]),
    )


def results_of(operation: str, operands: Operands, return_lse: bool) -> Callable[[Mapping[str, Any]], Any]:
    """A function from the results of the primitive to the results of the call: o, with lse if requested."""
    return_lse, packed = static_bool(operation, "return_lse", return_lse), operands.cu_seqlens_q is not None

    def finish(out: Mapping[str, Any]):
        o, lse = Outputs(**{name: x[0] if packed else x for name, x in out.items()})
        return (o, lse) if return_lse else o

    return finish


def _is_packed(operation: str, q, k, v, cu_seqlens_q, cu_seqlens_k) -> bool:
    if cu_seqlens_q is None and cu_seqlens_k is None:
        require_rank(
            operation, 4, "batch, length, heads, features (or 3 with cu_seqlens_q and cu_seqlens_k)", q=q, k=k, v=v
        )
        return False
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise value_error(operation, "cu_seqlens_q and cu_seqlens_k must be given together")
    require_rank(operation, 3, "tokens, heads, features, since cu_seqlens are given", q=q, k=k, v=v)
    return True


def _check_packed(operation: str, cu_seqlens_q, cu_seqlens_k, q_segment_ids, kv_segment_ids) -> None:
    if q_segment_ids is not None or kv_segment_ids is not None:
        raise value_error(
            operation, "segment ids and cu_seqlens both divide the tokens into sequences; give one of them"
        )
    lengths = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    require_cuts(operation, **lengths)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise value_error(
            operation, "cu_seqlens_q and cu_seqlens_k must both have sequences + 1 ≥ 2 entries", **lengths
        )


def _check_arrays(operation: str, q, k, v) -> None:
    shown = dict(q=q, k=k, v=v)
    require_dtype(operation, np.floating, "a float type", **shown)
    require_same_dtype(operation, **shown)
    (batch, _, heads, depth), (_, length, groups, _) = q.shape, k.shape
    for name, x in shown.items():
        if 0 in x.shape[2:]:
            raise value_error(
                operation, f"{name} has {x.shape[2]} heads of {x.shape[3]} features; neither may be 0", **shown
            )
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != batch:
            raise value_error(
                operation, f"{name} has batch {x.shape[0]} but q has {batch}; they must be equal", **shown
            )
    if k.shape[-1] != depth:
        raise value_error(operation, f"k has {k.shape[-1]} features but q has {depth}; they must be equal", q=q, k=k)
    if v.shape[1:3] != (length, groups):
        raise value_error(
            operation,
            f"v has length {v.shape[1]} and {v.shape[2]} heads but k has {length} and {groups}; they must be equal",
            k=k,
            v=v,
        )
    if heads % groups:
        raise value_error(
            operation,
            f"k has {groups} heads but q has {heads}; query heads must be a multiple of key/value heads",
            q=q,
            k=k,
        )


def _precision(operation: str, precision):
    if precision is not None and not isinstance(precision, str):
        raise type_error(operation, f"precision is {shown(precision)}; it must be None or 'e4m3'")
    if precision not in (None, "e4m3"):
        raise value_error(operation, f"precision is {shown(precision)}; it must be None or 'e4m3'")
    return precision


def _statistics_dtype(q):
    """float32, or float64 for float64 inputs. NumPy's promotion is used, as JAX's may be set to strict and raise."""
    return np.promote_types(q.dtype, np.float32)


def _scale(operation: str, scale, q):
    """(static scale, traced scale or None). A traced scale is an operand, and the static scale is then 1."""
    if scale is None:
        require_known(operation, "the number of features, of which softmax_scale is a power,", q.shape[-1], q=q)
        return q.shape[-1] ** -0.5, None
    if isinstance(scale, jax.Array | jax.core.Tracer):
        if scale.shape != ():
            raise value_error(operation, "softmax_scale must be a scalar", softmax_scale=scale)
        require_dtype(operation, np.floating, "a float type", softmax_scale=scale)
        return 1.0, scale.astype(_statistics_dtype(q)).reshape(1, 1)
    return static_scale(operation, scale, _statistics_dtype(q)), None


def pairwise(operation: str, name: str, x, kind, wanted: str, q, k):
    """bias or mask with four axes, each of the size that the logits have or of size 1."""
    if x is None:
        return None
    x = array(operation, name, x)
    require_dtype(operation, kind, wanted, **{name: x})
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if len(x.shape) > 4 or any(s not in (1, f) for s, f in zip(x.shape[::-1], full[::-1], strict=False)):
        raise value_error(
            operation,
            f"{name} of shape {x.shape} does not broadcast to {full}, the shape of the logits [batch, heads, q, k]",
            **{name: x, "q": q, "k": k},
        )
    return x.reshape((1,) * (4 - len(x.shape)) + x.shape)


def softcap_for(operation: str, softcap, q) -> float | None:
    """A softcap by which the logits of q's dtype can be divided; None for one so large that it changes nothing."""
    softcap, dtype = positive_or_none(operation, "softcap", softcap), np.promote_types(q.dtype, np.float32)
    if softcap is None:
        return None
    if not LEAST_SOFTCAP <= softcap <= float(np.finfo(dtype).max):
        most = f"{np.finfo(dtype).max:.3g}, as logits are {dtype}"
        raise value_error(operation, f"softcap is {softcap}; it must be from 2**-60 to {most}", q=q)
    return softcap if softcap <= MOST_SOFTCAP else None


def window_within(operation: str, window, q, k) -> tuple[int | None, int | None]:
    """The window as (left, right), with None for a bound that hides no keys."""
    bounds = window_pair(operation, window)
    lengths = (k.shape[1], q.shape[1])  # i' ≤ K − 1 on the left; K − 1 ≤ i' + S − 1 on the right
    symbolic = is_symbolic(q) or is_symbolic(k)
    limits = (FAR if symbolic else n - 1 for n in lengths)
    return tuple(None if x is None or x >= limit else x for x, limit in zip(bounds, limits, strict=True))


def segment_ids(operation: str, q_ids, kv_ids, q, k):
    """Both segment ids as int32, negative for padding; ids of wider types are renumbered in ascending order."""
    if q_ids is None:
        return None, None
    found = []
    for name, ids, of, x in (("q_segment_ids", q_ids, "q", q), ("kv_segment_ids", kv_ids, "k", k)):
        ids = ids if isinstance(ids, np.ndarray) else array(operation, name, ids)
        require_dtype(operation, np.integer, "an integer type", **{name: ids})
        if isinstance(ids, np.ndarray) and ids.dtype.itemsize > 4 and not jax.config.jax_enable_x64:
            ids = np.maximum(ids, -1) if ids.dtype.kind == "i" else ids
            if ids.size and (most := ids.max()) > np.iinfo(np.int32).max:
                raise value_error(operation, f"{name} has an id of {most}; 64 bits need jax_enable_x64")
        ids = array(operation, name, ids)
        if ids.shape != x.shape[:2]:
            raise value_error(
                operation, f"{name} must be {x.shape[:2]}, batch and length of {of}", **{name: ids, of: x}
            )
        found.append(ids)
    if all(jnp.iinfo(ids.dtype).max <= np.iinfo(np.int32).max for ids in found):
        return tuple(ids.astype(jnp.int32) for ids in found)
    wide = np.dtype(f"uint{8 * max(ids.dtype.itemsize for ids in found)}")
    of_all = jnp.sort(jnp.concatenate([ids.astype(wide) for ids in found], axis=1), axis=1)
    number = jax.vmap(partial(jnp.searchsorted, method="sort"))
    return tuple(jnp.where(ids < 0, -1, number(of_all, ids.astype(wide)).astype(jnp.int32)) for ids in found)


def sinks_of_heads(operation: str, sinks, heads: int, q):
    """Sinks as [1, heads, n] in the dtype of statistics; None without sinks."""
    if sinks is None:
        return None
    sinks = array(operation, "sinks", sinks)
    require_dtype(operation, np.floating, "a float type", sinks=sinks)
    if len(sinks.shape) not in (1, 2) or sinks.shape[0] != heads:
        raise value_error(operation, f"sinks must be [{heads}] or [{heads}, n], one row a head", sinks=sinks, q=q)
    if 0 in sinks.shape:
        raise value_error(operation, "sinks has 0 of them for a head; leave it out", sinks=sinks)
    return sinks.astype(np.promote_types(q.dtype, np.float32)).reshape(1, heads, -1)
