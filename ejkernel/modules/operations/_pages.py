"""Checks of the arguments of attention over a cache: block tables, pages, scales, draft masks and plans."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from ...errors import shown as shown_value
from ...errors import type_error, value_error
from ...kernels._page_plan import decode_rows, ragged_rows, work_list
from ...ops.utils.operands import is_array, random_like
from ...primitives._batching import reshape_axes, split_axis
from ...primitives._pages import CacheSpec
from ...primitives._sharding import explicit_axes
from ._arguments import (
    array,
    array_or_none,
    int32,
    require_dtype,
    require_known,
    require_rank,
    size_or_none,
    static_bool,
    static_number,
    static_scale,
    window_pair,
)
from ._attention import FAR, softcap_for

QUANTISED = ("float8_e4m3fn", "int8")
ITEM = 8  # numbers in each work item of a plan

# The scale of quantised pages: one for all, one for each head, or one for each slot and head.
PageScale: TypeAlias = float | Float[Array, ""] | Float[Array, " kv_heads"] | Float[Array, "pages page_size kv_heads"]
RENAMED = {"softcap": "logits_soft_cap", "window": "sliding_window", "sinks": "softmax_aux"}


def cache_spec(
    operation: str, q, window, softcap, softmax_scale, num_splits=None, most_splits=None, batch_invariant=False
) -> CacheSpec:
    """The spec of a call, from its options."""
    left, _ = window_pair(operation, window)
    return CacheSpec(
        window=None if left is None or left >= FAR else left + 1,
        softcap=softcap_for(operation, softcap, q),
        softmax_scale=scale_of_logits(operation, softmax_scale, q),
        num_splits=size_or_none(operation, "num_splits", num_splits, most_splits),
        batch_invariant=static_bool(operation, "batch_invariant", batch_invariant),
    )


def scale_of_logits(operation: str, scale, q) -> float:
    """A static softmax_scale, by default that of the number of features."""
    if scale is None:
        require_known(operation, "the number of features, of which softmax_scale is a power,", q.shape[-1], q=q)
        return q.shape[-1] ** -0.5
    return static_scale(operation, scale, np.promote_types(q.dtype, np.float32))


def check_cache(operation: str, q, **caches: Any) -> None:
    """Raises unless q is float, the caches share q's dtype or a quantised one, and no axis that matters is empty."""
    require_dtype(operation, np.floating, "a float type", q=q)
    shown = dict(q=q, **caches)
    (first, x), *others = caches.items()
    for name, y in others:
        if y.dtype != x.dtype:
            raise type_error(operation, f"{name} is {y.dtype} but {first} is {x.dtype}; they must be equal", **caches)
    if x.dtype != q.dtype and x.dtype.name not in QUANTISED:
        rule = f"it must be that or {', '.join(QUANTISED)}"
        raise type_error(operation, f"{first} is {x.dtype} but q is {q.dtype}; {rule}", **shown)
    for name, y in shown.items():
        if 0 in (y.shape[-2:] if name == "q" else y.shape):
            raise value_error(operation, f"{name} has the shape {y.shape}; no axis of it may be 0", **shown)


def check_heads(operation: str, q, name: str, x, groups: int, features: int) -> None:
    """Raises unless the query heads are a multiple of `groups`, and x, which errors call `name`, has `features`."""
    heads = q.shape[-2]
    if heads % groups:
        rule = "query heads must be a multiple of key/value heads"
        raise value_error(operation, f"{name} has {groups} heads but q has {heads}; {rule}", **{"q": q, name: x})
    if features != q.shape[-1]:
        rule = "they must be equal"
        raise value_error(
            operation, f"{name} has {features} features but q has {q.shape[-1]}; {rule}", **{"q": q, name: x}
        )


def by_heads(operation: str, kv_pages: Any) -> Any:
    """kv_pages [p,s,2g,d] as [1,p,s,g,2,d]: where devices split the third axis, they split the heads."""
    groups = kv_pages.shape[2] // 2
    return split_axis(operation, "kv_pages", kv_pages, 2, (groups, 2), 0, "key/value heads")[None]


def as_pool(pages: Any, kv_pages: Any) -> Any:
    """Pages [1,p,s,g,2,d] in the shape of kv_pages, and split as it is: primitives leave a single head whole."""
    pool, like = reshape_axes(pages, 3, 2, (kv_pages.shape[2],))[0], jax.typeof(kv_pages)
    if not explicit_axes(like) or jax.typeof(pool).sharding == like.sharding:
        return pool
    return jax.sharding.reshard(pool, like.sharding)


def check_tables(operation: str, context_lens, block_tables, query_start_loc=None) -> None:
    """Raises if the shapes of a step's context_lens, block_tables and query_start_loc do not fit each other."""
    shown = dict(context_lens=context_lens, block_tables=block_tables)
    require_rank(operation, 1, "sequences", context_lens=context_lens)
    require_rank(operation, 2, "sequences, pages of a sequence", block_tables=block_tables)
    if query_start_loc is not None:
        shown["query_start_loc"] = query_start_loc
        require_rank(operation, 1, "sequences + 1", query_start_loc=query_start_loc)
    require_dtype(operation, np.integer, "an integer type", **shown)
    count = context_lens.shape[0]
    if count == 0 or block_tables.shape[0] != count or block_tables.shape[1] == 0:
        raise value_error(operation, f"block_tables must be [{count}, pages of a sequence], neither of them 0", **shown)
    if query_start_loc is not None and query_start_loc.shape[0] != count + 1:
        raise value_error(operation, f"query_start_loc must have {count + 1} entries, one more than sequences", **shown)


def require_whole(operation: str, axes: int, **arrays: Any) -> None:
    """Raises if Explicit axes of a mesh split one of the first `axes` axes of an array."""
    for name, x in arrays.items():
        aval = jax.typeof(x)
        spec = aval.sharding.spec[:axes] if explicit_axes(aval) else ()
        for axis, entry in enumerate(spec):
            if entry is not None:
                raise value_error(
                    operation,
                    f"axis {axis} of {name} is sharded over {entry!r}; it must be whole: reshard it, or call "
                    "the operation inside jax.shard_map, where each device has a step of its own",
                    **{name: x},
                )


def count_of_sequences(operation: str, num_seqs, **tables: Any):
    """num_seqs as [1, 1] int32, at most the number of sequences in the tables."""
    count = tables["context_lens"].shape[0]
    if not is_array(num_seqs):
        if isinstance(num_seqs, bool) or not isinstance(num_seqs, int):
            rule = "it must be an int or an array of integers"
            raise type_error(operation, f"num_seqs is {shown_value(num_seqs)}; {rule}")
        if not 0 <= num_seqs <= count:
            raise value_error(
                operation, f"num_seqs is {shown_value(num_seqs)}; there are tables of {count} sequences", **tables
            )
        return jnp.full((1, 1), num_seqs, jnp.int32)
    num_seqs = array(operation, "num_seqs", num_seqs)
    require_dtype(operation, np.integer, "an integer type", num_seqs=num_seqs)
    if num_seqs.shape not in ((), (1,)):
        raise value_error(operation, "num_seqs must be an int or [1]", num_seqs=num_seqs)
    return int32(num_seqs).reshape(1, 1)


def scale_of_pages(operation: str, name: str, scale, pages, groups: int, q):
    """The scale of pages [p,s,…] as [1, p or 1, s or 1, g or 1] in the dtype of statistics; None without a scale."""
    if scale is None:
        return None
    dtype = np.promote_types(q.dtype, np.float32)
    if not is_array(scale) and not hasattr(scale, "__jax_array__"):
        number = static_number(operation, name, scale)
        if not abs(number) <= float(np.finfo(dtype).max):
            raise value_error(operation, f"{name} is {number}; it must be finite, and a number of {dtype}")
        return jnp.full((1, 1, 1, 1), number, dtype)
    scale = array(operation, name, scale)
    require_dtype(operation, np.floating, "a float type", **{name: scale})
    of_slots = (*pages.shape[:2], groups)
    if scale.shape not in ((), (groups,), of_slots):
        rule = f"it must be a scalar, [{groups}] of the heads, or {list(of_slots)} of slots and heads"
        raise value_error(operation, f"{name} has the shape {scale.shape}; {rule}", **{name: scale})
    return jnp.expand_dims(scale.astype(dtype), tuple(range(4 - len(scale.shape))))


def mask_of_drafts(operation: str, mask, tokens: Any):
    """A draft_mask [tokens, drafts] as [1, tokens, drafts]; None without a mask."""
    mask = array_or_none(operation, "draft_mask", mask)
    if mask is None:
        return None
    require_rank(operation, 2, "tokens, drafts", draft_mask=mask)
    require_dtype(operation, np.bool_, "bool", draft_mask=mask)
    if mask.shape[0] != tokens or mask.shape[1] == 0:
        raise value_error(operation, f"draft_mask must be [{tokens}, drafts], at least one draft", draft_mask=mask)
    return mask[None]


def plan_of_step(operation: str, plan, least: Any, most: Any):
    """A plan as [1, rows, items, 8] int32, or None; raises unless least ≤ rows ≤ most, where these are static."""
    if plan is None:
        return None
    plan = array(operation, "plan", plan)
    require_rank(operation, 3, f"rows, items of a row, the {ITEM} numbers of a work item", plan=plan)
    rows, items, numbers = plan.shape
    if plan.dtype != jnp.int32 or numbers != ITEM or items == 0:
        rule = f"it must be what page_plan gives, [rows, items, {ITEM}] int32"
        raise value_error(operation, f"plan is {plan.dtype} of the shape {plan.shape}; {rule}", plan=plan)
    if not any(map(is_symbolic_dim, (rows, least, most))) and not least <= rows <= most:
        wanted = least if most == least else f"from {least} to {most}"
        raise value_error(operation, f"plan has {rows} rows; that of such a step has {wanted}", plan=plan)
    return plan[None]


def synthetic_step(operands: Mapping[str, Any], tokens: int, pages: int, page: int) -> dict[str, Any]:
    """Random arrays; sequences have equal shares of the tokens, and contexts of three quarters of their pages."""
    values, (_, count, columns) = random_like(dict(operands)), operands["block_tables"].shape
    new = -(-tokens // count)
    made = dict(
        context_lens=np.full(count, max(new, 3 * columns * page // 4)),
        block_tables=np.arange(count * columns).reshape(count, columns) % pages,
        query_start_loc=np.minimum(np.arange(count + 1) * new, tokens),
        num_seqs=[count],
    )
    made = {name: jnp.asarray(x, jnp.int32) for name, x in made.items() if name in operands}
    if "plan" in operands:
        made["plan"] = _plan_of(operands["plan"].shape[1:], made, tokens, page)
    return values | {name: jnp.broadcast_to(x, operands[name].shape) for name, x in made.items()}


def _plan_of(shape: tuple[int, int, int], tables: Mapping[str, Any], tokens: int, page: int):
    """A plan of a given shape for the tables of a step; for one device's part of a plan, a plan without work."""
    (rows, items, _), count = shape, len(tables["context_lens"])
    workers, lengths = max(1, rows * (items - 1)), tables["context_lens"]
    of_item = next((n for n in range(1, tokens + 2) if tokens // n == rows - count), None)
    if of_item is None:
        return jnp.zeros(shape, jnp.int32)
    if "query_start_loc" not in tables:
        return work_list(decode_rows(lengths, page, None), workers)
    starts = tables["query_start_loc"]
    return work_list(ragged_rows(lengths, starts, count, tokens, page, None, of_item, None), workers)
