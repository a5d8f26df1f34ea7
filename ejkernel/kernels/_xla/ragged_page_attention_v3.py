"""ragged_page_attention_v3 in plain JAX: the formula, and its decomposition into blocks of tokens and of pages.

Token i of sequence n stands at position p = context_lens[n] − q_len[n] + i. Its key and value go into slot
`p % page_size` of page `block_tables[n, p // page_size]`; then it attends over the positions up to its own:

    s_j = softcap·tanh(softmax_scale · q·k_j / softcap)        lse = log(Σ_j exp s_j + Σ exp sinks)
    o = Σ_j exp(s_j − lse) v_j

Slots past a context may hold anything, NaN too: what no token may see is masked in s, and zeroed in v.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.export import is_symbolic_dim

from ejkernel.primitives.ragged_page_attention_v3 import Operands, Outputs, RaggedPageAttentionSpec
from ejkernel.types import Target
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from .._registry import Backend, Platform, configured_by, kernel_registry
from .._visibility import interval
from ._attention import statistics_dtype


class Places(NamedTuple):
    """Where each token of a step belongs: its sequence, its position there, and whether it is of any sequence."""

    sequence: Array
    position: Array
    valid: Array


def reference(*operands, spec=RaggedPageAttentionSpec()) -> Outputs:
    """The formula, with the logits of every token and every slot of its sequence."""
    return _over_batch(partial(_reference, spec=spec), Operands(*operands))


def heuristic(spec: RaggedPageAttentionSpec, operands: Operands, target: Target) -> RaggedPageAttentionConfig:
    """64 tokens beside some 256 keys: what is gathered for them fits the cache of a CPU."""
    return RaggedPageAttentionConfig(64, pages_per_block=max(1, 256 // operands.kv_pages.shape[2]))


def space(spec: RaggedPageAttentionSpec, operands: Operands, target: Target) -> list[RaggedPageAttentionConfig]:
    """That of the heuristic."""
    return [heuristic(spec, operands, target)]


@kernel_registry.register("ragged_page_attention_v3", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
def ragged_page_attention_v3(
    *operands: Array | None,
    spec: RaggedPageAttentionSpec = RaggedPageAttentionSpec(),
    config: RaggedPageAttentionConfig = RaggedPageAttentionConfig(),
) -> Outputs:
    """o, lse, and the pages with the step's keys and values."""
    return _over_batch(partial(_step, spec=spec, config=config), Operands(*operands))


def _over_batch(step, x: Operands) -> Outputs:
    """The step of each batch index; a batch of one, which is that of a call without `vmap`, is no loop."""
    sinks = None if x.sinks is None else jnp.broadcast_to(x.sinks, (x.q.shape[0], *x.sinks.shape[1:]))
    x = x._replace(sinks=sinks)
    if x.q.shape[0] != 1:
        return jax.vmap(step)(x)
    return jax.tree.map(lambda a: a[None], step(jax.tree.map(lambda a: a[0], x)))


def places(x: Operands) -> Places:
    """The places of the tokens; entries of query_start_loc past the last sequence may hold anything."""
    n = x.context_lens.shape[0]
    count = jnp.clip(x.num_seqs[0], 0, n)
    starts = jnp.where(jnp.arange(n + 1, dtype=jnp.int32) <= count, x.query_start_loc, x.query_start_loc[count])
    token = jnp.arange(x.q.shape[0], dtype=jnp.int32)
    sequence = jnp.searchsorted(starts[1:], token, side="right").astype(jnp.int32)
    valid = (token >= starts[0]) & (token < starts[-1])
    sequence = jnp.where(valid, sequence, 0)
    position = x.context_lens[sequence] - starts[sequence + 1] + token
    return Places(sequence, position, valid & (position >= 0))


def written(x: Operands, at: Places) -> Array:
    """The pages with the keys and values of the valid tokens, every other byte as it was.

    A token whose page is not in the pool, or not in the table, is written nowhere.
    """
    pages, size = x.kv_pages.shape[:2]
    column = at.position // size
    in_table = at.valid & (column < x.block_tables.shape[1])
    page = x.block_tables[at.sequence, jnp.where(in_table, column, 0)]
    page = jnp.where(in_table & (page >= 0) & (page < pages), page, pages)
    new = jnp.stack([x.k, x.v], axis=2).astype(x.kv_pages.dtype)
    return x.kv_pages.at[page, at.position % size].set(new, mode="drop")


def _intervals(at: Places, spec: RaggedPageAttentionSpec) -> tuple[Array, Array]:
    """The keys first ≤ j < stop that each token sees, [tokens]: those up to its own, within the window."""
    left = None if spec.window is None else spec.window - 1
    return interval(at.position, left, 0, 0, jnp.where(at.valid, at.position + 1, 0))


def _visible(first: Array, stop: Array, key: Array) -> Array:
    """[tokens, keys]."""
    first, stop, key = first[:, None], stop[:, None], key[None]
    return (first <= key) & (key < stop)


def _logits(q: Array, k: Array, seen: Array, spec: RaggedPageAttentionSpec) -> Array:
    """[t,g,r,l] from q [t,g,r,d] and k [t,l,g,d]; −∞ where a key is not seen [t,l]."""
    dtype = statistics_dtype(q.dtype)
    s = jnp.einsum("tgrd,tlgd->tgrl", q, k.astype(q.dtype), precision="highest", preferred_element_type=dtype)
    s = s * np.array(spec.softmax_scale, dtype)
    if spec.softcap is not None:
        softcap = np.array(spec.softcap, dtype)
        s = softcap * jnp.tanh(s / softcap)
    return jnp.where(seen[:, None, None], s, np.array(-np.inf, dtype))


def _weighted(p: Array, v: Array, seen: Array, dtype: Any) -> Array:
    """Σ_l p [t,g,r,l] · v [t,l,g,d]; a value that is not seen counts as 0 whatever it is."""
    v = jnp.where(seen[:, :, None, None], v.astype(dtype), np.array(0, dtype))
    return jnp.einsum("tgrl,tlgd->tgrd", p.astype(dtype), v, precision="highest", preferred_element_type=p.dtype)


def _first(x: Operands, dtype: Any, tokens: int, groups: int) -> tuple[Array, Array]:
    """The maximum and the sum of exponentials relative to it that rows begin with: of the sinks."""
    heads = x.q.shape[1]
    shape = (tokens, groups, heads // groups)
    if x.sinks is None:
        return jnp.full(shape, -np.inf, dtype), jnp.zeros(shape, dtype)
    sinks = x.sinks.astype(dtype).reshape(1, groups, heads // groups, -1)
    m = sinks.max(-1)
    l = jnp.exp(sinks - _finite(m)[..., None]).sum(-1)
    return jnp.broadcast_to(m, shape), jnp.broadcast_to(l, shape)


def _finite(m: Array) -> Array:
    """A maximum, and 0 where nothing was seen, so that exp(s − m) is 0 there."""
    return jnp.where(jnp.isfinite(m), m, jnp.zeros((), m.dtype))


def _results(m: Array, l: Array, o: Array, valid: Array, like: Array) -> tuple[Array, Array]:
    """o [t,h,d] and lse [t,h] of rows in [t,g,r,…]; 0 and −∞ for tokens of no sequence."""
    tokens, heads, features = like.shape
    lse = jnp.where(valid[:, None, None], _finite(m) + jnp.log(l), np.array(-np.inf, l.dtype))
    o = o / jnp.where(l == 0, jnp.ones((), l.dtype), l)[..., None]
    return o.astype(like.dtype).reshape(tokens, heads, features), lse.reshape(tokens, heads)


def _reference(x: Operands, spec: RaggedPageAttentionSpec) -> Outputs:
    at, (tokens, heads, features), groups = places(x), x.q.shape, x.k.shape[1]
    pages = written(x, at)
    kv = pages[jnp.clip(x.block_tables[at.sequence], 0, pages.shape[0] - 1)]
    k, v = (kv[:, :, :, :, n].reshape(tokens, -1, groups, features) for n in (0, 1))
    seen = _visible(*_intervals(at, spec), jnp.arange(k.shape[1], dtype=jnp.int32))
    s = _logits(x.q.reshape(tokens, groups, heads // groups, features), k, seen, spec)
    m_sinks, l_sinks = _first(x, s.dtype, tokens, groups)
    m = jnp.maximum(s.max(-1), m_sinks)
    p = jnp.exp(s - _finite(m)[..., None])
    l = p.sum(-1) + l_sinks * jnp.exp(m_sinks - _finite(m))
    return Outputs(*_results(m, l, _weighted(p, v, seen, x.q.dtype), at.valid, x.q), pages)


# --- The decomposition ------------------------------------------------------------------------------------------------


def _step(x: Operands, spec: RaggedPageAttentionSpec, config: RaggedPageAttentionConfig) -> Outputs:
    at, tokens = places(x), x.q.shape[0]
    pages = written(x, at)
    attend = partial(_attend_block, x, pages, spec, config.pages_per_block)
    if is_symbolic_dim(tokens):
        return Outputs(*attend(x.q, at), pages)
    block = min(config.queries_per_block, max(1, tokens))
    cut = lambda a: jnp.pad(a, [(0, -tokens % block), *[(0, 0)] * (a.ndim - 1)]).reshape(-1, block, *a.shape[1:])
    o, lse = lax.map(lambda rows: attend(*rows), jax.tree.map(cut, (x.q, at)))
    join = lambda a: a.reshape(-1, *a.shape[2:])[:tokens]
    return Outputs(join(o), join(lse), pages)


def _attend_block(x: Operands, pages: Array, spec, columns: int, q: Array, at: Places) -> tuple[Array, Array]:
    """o and lse of a block of tokens: a running softmax over the pages that any of them sees, `columns` at a time."""
    (tokens, heads, features), groups, size = q.shape, pages.shape[2], columns * pages.shape[1]
    rows, dtype = q.reshape(tokens, groups, heads // groups, features), statistics_dtype(q.dtype)
    tables, (first, stop) = x.block_tables[at.sequence], _intervals(at, spec)

    def step(n, carry):
        m, l, o = carry
        column = n * columns + jnp.arange(columns, dtype=jnp.int32)
        page = tables[:, jnp.minimum(column, tables.shape[1] - 1)]
        kv = pages[jnp.clip(page, 0, pages.shape[0] - 1)]
        k, v = (kv[:, :, :, :, i].reshape(tokens, size, groups, features) for i in (0, 1))
        key = n * size + jnp.arange(size, dtype=jnp.int32)
        in_table = key < tables.shape[1] * pages.shape[1]
        seen = _visible(first, stop, key) & in_table[None]
        s = _logits(rows, k, seen, spec)
        m_new = jnp.maximum(m, s.max(-1))
        p, alpha = jnp.exp(s - _finite(m_new)[..., None]), jnp.exp(m - _finite(m_new))
        return m_new, l * alpha + p.sum(-1), o * alpha[..., None] + _weighted(p, v, seen, q.dtype)

    begin = jnp.where(first < stop, first, jnp.iinfo(jnp.int32).max).min() // size
    end = -(-stop.max() // size)
    o = jnp.zeros((tokens, groups, heads // groups, features), dtype)
    m, l, o = lax.fori_loop(begin, end, step, (*_first(x, dtype, tokens, groups), o))
    return _results(m, l, o, at.valid, q)
