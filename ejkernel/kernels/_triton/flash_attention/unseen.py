"""Zeros where a mask or segment ids leave a query without keys, or a key without queries.

What stands there may be padding that holds NaN, which a weight of zero does not keep out of a product. It is taken out
before a kernel runs: in the kernel it would cost every tile a way through registers. (Keys that the band or the lengths
of sequences hide are never read: see `Problem.checked`.)
"""

import jax
import jax.numpy as jnp

from ejkernel.primitives.flash_attention import Operands

from .problem import Problem


def zero_unseen_keys(operands: Operands, problem: Problem, *arrays):
    """Arrays [B, K, G, ·] or None, zero in the keys that no query sees."""
    if operands.mask is None and operands.q_segment_ids is None:
        return arrays
    seen = operands.mask[:, :, 0] if _hides_keys(operands) else _visible(operands, problem).any(2)
    if seen.shape[1] > 1:
        seen = seen.reshape(seen.shape[0], problem.G, problem.group, -1).any(2)
    return _where_seen(seen, arrays)


def zero_blind_queries(operands: Operands, problem: Problem, *arrays):
    """Arrays [B, S, H, ·], zero in the queries that see no key."""
    if operands.mask is None and operands.q_segment_ids is None:
        return arrays
    if not _hides_keys(operands):
        return _where_seen(_visible(operands, problem).any(3), arrays)
    mask = operands.mask[:, :, 0]
    mask = jnp.broadcast_to(mask, (*mask.shape[:2], problem.K)).astype(jnp.int32)
    before = jnp.pad(jnp.cumsum(mask, 2), ((0, 0), (0, 0), (1, 0)))  # how many keys before each are left
    first, stop = (x[:, None] for x in _shown(operands, problem))
    return _where_seen(_taken(before, stop) > _taken(before, first), arrays)


def _hides_keys(operands: Operands) -> bool:
    """A mask hides keys from all queries alike, and nothing else hides any that are read."""
    return operands.mask is not None and operands.mask.shape[2] == 1 and operands.q_segment_ids is None


def _where_seen(seen, arrays) -> tuple:
    """For each array its values where `seen` [b?, heads?, tokens?], and zeros elsewhere."""
    seen = seen.swapaxes(1, 2)[..., None]
    return tuple(None if x is None else jnp.where(seen, x, jnp.zeros((), x.dtype)) for x in arrays)


def _visible(operands: Operands, problem: Problem):
    """Whether a query sees a key: bool [b?, h?, s?, t?], to be reduced by whoever asks and never stored."""
    first, stop = (x[:, :, None] for x in _shown(operands, problem))
    key = jnp.arange(problem.K, dtype=jnp.int32)
    ok = (key >= first) & (key < stop)
    if operands.q_segment_ids is not None:
        q_ids, kv_ids = operands.q_segment_ids[:, :, None], operands.kv_segment_ids[:, None, :]
        ok &= (q_ids == kv_ids) & (q_ids >= 0)
    return ok[:, None] if operands.mask is None else ok[:, None] & operands.mask


def _shown(operands: Operands, problem: Problem) -> tuple:
    """The first key that the sequences and the band show to each query, and the one after the last: [b?, S] each."""
    q_cuts, k_cuts = (
        jnp.array([[0, tokens]], jnp.int32) if cuts is None else cuts
        for cuts, tokens in ((operands.cu_seqlens_q, problem.S), (operands.cu_seqlens_k, problem.K))
    )
    token = jnp.arange(problem.S, dtype=jnp.int32)
    sequence = jax.vmap(lambda ends: jnp.searchsorted(ends, token, side="right"))(q_cuts[:, 1:])
    q_start, k_start = _taken(q_cuts, sequence), _taken(k_cuts, sequence)
    # Tokens past the last sequence have no keys: there an end is that of the cuts, which is where they begin.
    q_length, k_length = (_taken(cuts, sequence + 1) - start for cuts, start in ((q_cuts, q_start), (k_cuts, k_start)))
    aligned = token - q_start + k_length - q_length
    first = jnp.zeros_like(aligned) if problem.left is None else aligned - problem.left
    stop = k_length if problem.right is None else aligned + problem.right + 1
    k_length = jnp.where(token < q_cuts[:, :1], 0, k_length)  # nor have those before the first
    return k_start + jnp.clip(first, 0, k_length), k_start + jnp.clip(stop, 0, k_length)


def _taken(x, index):
    """x[b?, ·] at index [b?, ·], an index beyond the end being that of the last."""
    index = jnp.minimum(index, x.shape[-1] - 1)
    shape = jnp.broadcast_shapes(x.shape[:-1], index.shape[:-1])
    return jnp.take_along_axis(*(jnp.broadcast_to(y, (*shape, y.shape[-1])) for y in (x, index)), -1)
