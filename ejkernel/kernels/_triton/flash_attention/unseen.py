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
    if not (problem.masked_everywhere or problem.segmented):
        return arrays
    seen = _visible(operands, problem).any(2)
    if seen.shape[1] > 1:
        seen = seen.reshape(seen.shape[0], problem.G, problem.group, -1).any(2)
    return _where_seen(seen, arrays)


def zero_blind_queries(operands: Operands, problem: Problem, *arrays):
    """Arrays [B, S, H, ·], zero in the queries that see no key."""
    if not (problem.masked_everywhere or problem.segmented):
        return arrays
    return _where_seen(_visible(operands, problem).any(3), arrays)


def _where_seen(seen, arrays) -> tuple:
    """For each array its values where `seen` [b?, heads?, tokens?], and zeros elsewhere."""
    seen = seen.swapaxes(1, 2)[..., None]
    return tuple(None if x is None else jnp.where(seen, x, jnp.zeros((), x.dtype)) for x in arrays)


def _visible(operands: Operands, problem: Problem):
    """Whether a query sees a key: bool [b?, h?, s?, t?], to be reduced by whoever asks and never stored."""
    q_sequence, i, q_lengths = _places(operands.cu_seqlens_q, problem.S)
    k_sequence, j, k_lengths = _places(operands.cu_seqlens_k, problem.K)
    shift = jnp.pad(k_lengths - q_lengths, ((0, 0), (0, 1)))
    distance = j[:, None, :] - (i + jnp.take_along_axis(shift, q_sequence, 1))[:, :, None]
    ok = jnp.ones((1, 1, 1), bool)
    if problem.N is not None:
        ok = (q_sequence[:, :, None] == k_sequence[:, None, :]) & (q_sequence[:, :, None] < problem.N)
    if problem.left is not None:
        ok &= distance >= -problem.left
    if problem.right is not None:
        ok &= distance <= problem.right
    if problem.segmented:
        q_ids, kv_ids = operands.q_segment_ids[:, :, None], operands.kv_segment_ids[:, None, :]
        ok &= (q_ids == kv_ids) & (q_ids >= 0)
    return ok[:, None] if operands.mask is None else ok[:, None] & operands.mask


def _places(cu_seqlens, tokens: int):
    """The sequence [b?, T] of each token, its index in it, and the lengths [b?, N] of the sequences."""
    cu = jnp.array([[0, tokens]], jnp.int32) if cu_seqlens is None else cu_seqlens
    token = jnp.arange(tokens, dtype=jnp.int32)[None]
    sequence = jax.vmap(lambda ends: jnp.searchsorted(ends, token[0], side="right"))(cu[:, 1:])
    return sequence, token - jnp.take_along_axis(cu, sequence, 1), cu[:, 1:] - cu[:, :-1]
