"""The online softmax of a work item: a block of keys for all heads, and the results after the last block.

Each query has a maximum m, denominator l and accumulator a over the blocks so far. A block of logits s updates them to

    m' = max(m, max s);   l' = l·exp(m − m') + Σ exp(s − m');   a' = a·exp(m − m') + Σ exp(s − m')·v

and in the end o = a / l, lse = m + log l, where the sinks enter l as one more logit without a value.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._visibility import interval

from ..flash_attention.tiles import MASKED, contract, tanh
from .cache import LANES
from .problem import Inputs, Outputs, Problem, State
from .work import WorkItem

# The most rows of all heads together that are computed by unrolled code.
ROWS_AT_ONCE = 128


def heads_at_once(heads: int, rows: int) -> int:
    """The number of heads whose code is unrolled, for tiles of `rows` rows each."""
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * rows <= ROWS_AT_ONCE))


def accumulate(x: Inputs, buffers, state: State, item: WorkItem, block, slot, problem: Problem):
    """Updates the online softmax of all heads with a block of keys.

    The code for a few small tiles is unrolled, for the compiler to interleave. Larger tiles are computed in a loop, for
    which keys and values are sorted by heads first: a strided load cannot begin at a row known only at run time.
    """
    heads, rows, _ = x.q.shape
    begin = (lax.div(item.first, problem.keys) + block) * problem.keys
    key = begin + lax.broadcasted_iota(jnp.int32, (problem.keys, 1), 0)
    is_visible = (key >= item.first) & (key < item.stop)
    visible = visible_to_rows(x.drafts, item, begin, rows, problem)
    if x.drafts is not None:
        of_any = lambda: _visible_to_any(visible, item, problem)
        is_visible &= lax.cond(_has_drafts(item, begin, problem), of_any, lambda: jnp.ones(key.shape, jnp.float32)) > 0
    loaders = [
        cache.loader(buffer, slot, is_visible, x.q.dtype)
        for cache, buffer in zip(problem.caches, buffers[: len(problem.caches)], strict=True)
    ]
    scales = _scales_of_columns(buffers, slot, state, problem)

    def of_head(g, keys, values):
        columns = {of: scale[g] for of, scale in scales.items()}
        factor = _factor(x.k_scale, item, g, problem.spec.softmax_scale) * columns.get("keys", 1)
        _accumulate_head(x.q, state, g, keys, values, visible, factor, columns.get("values"), problem)

    of_keys = lambda g, part: loaders[0](g * problem.rows_of_head, part)
    of_values = lambda g, part: loaders[-1]((g + 1) * problem.rows_of_head - 1, part)
    if problem.latent:
        of_values = lambda g, part: of_keys(g, part)[:, : problem.latent]
    if state.keys is None:
        for g in range(heads):
            of_head(g, partial(of_keys, g), partial(of_values, g))
        return
    for g in range(heads):
        for sorted_by_heads, load in ((state.keys, of_keys), (state.values, of_values)):
            for part in range(sorted_by_heads.shape[1]):
                sorted_by_heads[g, part] = load(g, part)
    count = heads_at_once(heads, rows)

    def of_heads(n, carry):
        for g in range(count):
            g = n * count + g
            of_head(g, lambda part, g=g: state.keys[g, part], lambda part, g=g: state.values[g, part])
        return carry

    lax.fori_loop(0, heads // count, of_heads, 0)


def _scales_of_columns(buffers, slot, state: State, problem: Problem) -> dict[str, Any]:
    """The scales of slots of a block as refs [g, 1, keys], by whose they are, for a loop over heads."""
    found = {}
    for scale, buffer, rows in zip(problem.scales, buffers[len(problem.caches) :], state.scales, strict=True):
        columns = scale.columns(buffer, slot)
        for g in range(scale.heads):
            rows[g] = columns[g : g + 1]
        found |= dict.fromkeys(scale.of, rows)
    return found


def _accumulate_head(q, state: State, g, keys: Callable, values: Callable, visible, factor, v_scale, problem: Problem):
    """Updates the online softmax of head g; `keys(part)` and `values(part)` load a part of the features.

    The factor of the logits, and `v_scale`, which may be None, of the weights may differ between columns. Either may be
    NaN where a slot is not visible.
    """
    rows = q.shape[1]
    products = [contract(q[g, :, part], keys(n), (1, 1)) for n, part in enumerate(problem.caches[0].parts)]
    weights, rescale = weights_of(sum(products[1:], products[0]) * factor, visible, state, g, problem)
    if v_scale is not None:
        weights = jnp.where(visible, weights * v_scale, 0)
        weights = weights if q.dtype == jnp.float32 else jnp.concatenate(in_parts(weights, 2))
    for n, part in enumerate(problem.value_parts):
        product = contract(weights.astype(q.dtype), values(n), (1, 0))
        product = sum((product[m : m + rows] for m in range(rows, weights.shape[0], rows)), product[:rows])
        state.weighted[g, :, part] = state.weighted[g, :, part] * rescale + product


def weights_of(s, visible, state: State, g, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """The weights exp(s − m') of a block of logits of head g, and exp(m − m'); updates m and l of the state."""
    softcap = problem.spec.softcap
    if softcap is not None:
        s = softcap * tanh(s * (1 / softcap), softcap)
    s = jnp.where(visible, s, MASKED)
    before = state.maximum[g, :, :1]
    maximum = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
    weights, rescale = jnp.exp(s - maximum), jnp.exp(before - maximum)
    total = state.total[g, :, :1] * rescale + jnp.sum(weights, axis=1, keepdims=True)
    state.maximum[g] = jnp.broadcast_to(maximum, (s.shape[0], LANES))
    state.total[g] = jnp.broadcast_to(total, (s.shape[0], LANES))
    return weights, rescale


def in_parts(weights: jax.Array, count: int) -> list[jax.Array]:
    """Weights as a sum of parts: their first 8 bits, which bfloat16 holds, the next 8, …, and the rest.

    Rounded to bfloat16 once, weights times scales would add an error as large as the rounding of the result: even the
    largest weight, which without a scale is exactly 1, would be rounded. A product of parts has `count` times the rows.
    """
    parts = []
    for _ in range(count - 1):
        parts.append(pltpu.bitcast(pltpu.bitcast(weights, jnp.int32) & np.int32(-1 << 16), jnp.float32))
        weights = weights - parts[-1]
    return [*parts, weights]


def visible_to_rows(drafts, item: WorkItem, begin, rows: int, problem: Problem) -> jax.Array:
    """Which rows see which keys of a block that begins at key `begin`, bool [rows, keys]."""
    first, stop = item.first, item.stop
    if problem.tokens > 1:
        position = item.position + _token_of(lax.broadcasted_iota(jnp.int32, (rows, 1), 0), problem)
        first, stop = interval(position, problem.spec.left, 0 if drafts is None else None, first, stop)
    key = begin + lax.broadcasted_iota(jnp.int32, (rows, problem.keys), 1)
    visible = (key >= first) & (key < stop)
    if drafts is not None:
        told = lambda: _told_of_drafts(drafts, item, begin, problem)
        told = lax.cond(_has_drafts(item, begin, problem), told, lambda: jnp.zeros(key.shape, jnp.float32))
        visible &= (key < item.cached) | (told > 0.5)
    return visible


def _has_drafts(item: WorkItem, begin, problem: Problem) -> jax.Array:
    """Whether there are drafts in a block of keys; the mask is not read for others."""
    return begin + problem.keys > item.cached


def _told_of_drafts(drafts, item: WorkItem, begin, problem: Problem) -> jax.Array:
    """1 where a row sees a draft of the block by its mask, else 0, float32 [rows, keys]."""
    width = drafts.shape[1]
    new = begin - item.cached + lax.broadcasted_iota(jnp.int32, (problem.keys, width), 0)
    is_draft = new == lax.broadcasted_iota(jnp.int32, (problem.keys, width), 1)
    return contract(drafts[...], is_draft.astype(jnp.float32).astype(drafts.dtype), (1, 1))


def _visible_to_any(visible: jax.Array, item: WorkItem, problem: Problem) -> jax.Array:
    """How many tokens of the work item see a key of a block, float32 [keys, 1], of which rows see which [rows, keys].

    A draft that none sees may hold NaN, which a weight of 0 does not hide. The sum over rows is a product, because
    that brings it from lanes to sublanes.
    """
    row = lax.broadcasted_iota(jnp.int32, visible.shape, 0)
    ours = _of_item(row, item, problem) & (item.position + _token_of(row, problem) >= 0)
    ones = jnp.ones((visible.shape[0], LANES), jnp.bfloat16)
    return contract(jnp.where(visible & ours, 1.0, 0.0).astype(ones.dtype), ones, (0, 0))[:, :1]


def _token_of(row: jax.Array, problem: Problem) -> jax.Array:
    """⌊row / group⌋, in float32, as the vector unit has no integer division; row + ½ keeps it clear of rounding up."""
    return ((row.astype(jnp.float32) + 0.5) * (1 / problem.group)).astype(jnp.int32)


def _factor(scale, item: WorkItem, g: int, static: float):
    """The factor `static` times the scale of head g from [b?, g?] in scalar memory, if there is one."""
    if scale is None:
        return static
    return static * scale[item.batch if scale.shape[0] > 1 else 0, g if scale.shape[1] > 1 else 0]


def write(x: Inputs, out: Outputs, state: State, item: WorkItem, problem: Problem):
    """Writes o and lse of the tokens of a work item; results of other tokens in the tile are kept."""
    heads, rows, _ = state.maximum.shape
    ours = lambda axis, shape: _of_item(lax.broadcasted_iota(jnp.int32, shape, axis), item, problem)
    for g in range(heads):
        maximum, total = state.maximum[g, :, :1], state.total[g, :, :1]
        weight = jnp.where(maximum > MASKED, 1.0, 0.0)
        is_some = maximum > MASKED
        if x.sinks is not None:
            sink = x.sinks[g, :, :1]
            with_sink = jnp.maximum(maximum, sink)
            weight *= jnp.exp(maximum - with_sink)
            total = total * weight + jnp.exp(sink - with_sink)
            maximum, is_some = with_sink, is_some | (sink > MASKED)
        # A fully masked row has only masked logits, each with a weight of 1, or no block at all.
        factor = weight * _factor(x.v_scale, item, g, 1.0) / total
        o = jnp.where(weight > 0, state.weighted[g] * factor, 0).astype(out.o.dtype)
        lse = jnp.where(is_some, maximum + jnp.log(total), -jnp.inf)
        lse = jnp.broadcast_to(lse, (rows, LANES)).T[:1]
        if problem.tokens > 1:
            o = jnp.where(ours(0, o.shape), o.astype(jnp.float32), out.o[g].astype(jnp.float32)).astype(o.dtype)
            lse = jnp.where(ours(1, lse.shape), lse, out.lse[g : g + 1])
        out.o[g] = o
        out.lse[g : g + 1] = lse


def _of_item(row: jax.Array, item: WorkItem, problem: Problem) -> jax.Array:
    """Whether the rows of a tile belong to the tokens of the work item."""
    return (row >= item.begin * problem.group) & (row < item.end * problem.group)
