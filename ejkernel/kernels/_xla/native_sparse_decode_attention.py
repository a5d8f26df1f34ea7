"""native_sparse_decode_attention in plain JAX: each branch gathers the keys that it sees, for each sequence.

With s_j = scale · q·k_j over the keys of a branch, and a gate for each branch:

    o = Σ gate · Σ_j exp(s_j − lse) v_j,   lse = log Σ_j exp s_j

Blocks are chosen as by `native_sparse_blocks`, whose mean keys are given.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.primitives.native_sparse_attention import Operands as OneQuery
from ejkernel.primitives.native_sparse_decode_attention import NativeSparseDecodeAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig
from ejkernel.xla_utils.comparison import is_less

from .._native_sparse_decode import selected_blocks
from .._registry import Backend, Platform, kernel_registry
from ._gathered_keys import Near, gathered, lists_of, logits_of, not_zero, over_keys, softmax_of

Spec = NativeSparseDecodeAttentionSpec
# The operands of one key/value head of one sequence, and the spec → the keys of a branch.
Keys = Callable[[Operands, Spec], Near]


def reference(*operands: Any, spec: Spec = Spec()) -> Outputs:
    """The formula, with the logits of every key of the cache in each branch."""

    def selected(x: Operands, spec: Spec) -> Near:
        listed = (x.block_indices[:, None] == _tokens(x.k)[None] // spec.block_size).any(0)
        return _all(x.k, x.v, x.sequence_end, listed)

    return _outputs(Operands(*operands), selected, _all_of_window, spec)


@kernel_registry.register("native_sparse_decode_attention", Platform.XLA, Backend.ANY)
def native_sparse_decode_attention(
    *operands: Array | None, spec: Spec = Spec(), config: KernelConfig = KernelConfig()
) -> Outputs:
    """o and the blocks of native_sparse_decode_attention, in XLA."""
    return _outputs(Operands(*operands), _selected, _window, spec)


def _outputs(x: Operands, selected: Keys, window: Keys, spec: Spec) -> Outputs:
    result, groups, blocks = (*x.q.shape[:2], x.v.shape[3]), x.k.shape[2], selected_blocks(x, spec)
    by_group = lambda a: None if a is None else a.reshape(a.shape[0], groups, a.shape[1] // groups, *a.shape[2:])
    heads = {name: by_group(getattr(x, name)) for name in ("q", "g_cmp", "g_slc", "g_swa")}
    x = x._replace(**heads, sequence_end=jnp.clip(x.sequence_end, 0, x.k.shape[1]))
    of_group = partial(_of_group, selected=selected, window=window, spec=spec)
    of_groups = jax.vmap(of_group, in_axes=(Operands(0, 1, 1, None, 1, 1, 0, 0, 0, None, 0),))
    o = jax.vmap(of_groups)(x._replace(ranks=None, block_indices=blocks))
    return Outputs(o.reshape(result), blocks)


# --- One key/value head of one sequence: q [r,d], k [t,d], v [t,e], means [x,·], gates [r], block_indices [n] --------


def _of_group(x: Operands, *, selected: Keys, window: Keys, spec: Spec) -> Array:
    """o [r,e], summed over the branches."""

    def branch(gate: Array | None, near: Near) -> Array:
        _, weights, total = softmax_of(logits_of(x.q[None], near, spec))
        o = (over_keys(weights, near.v) / not_zero(total))[0]
        # The gates of a sequence without keys may be NaN.
        return o if gate is None else jnp.where(x.sequence_end > 0, gate, 0).astype(o.dtype)[:, None] * o

    o = branch(x.g_slc, selected(x, spec))
    if x.g_cmp is not None:
        means = (a.astype(x.q.dtype) for a in (x.k_cmp, x.v_cmp))
        o += branch(x.g_cmp, _all(*means, x.sequence_end // spec.block_size))
    if spec.window is not None:
        o += branch(x.g_swa, window(x, spec))
    return o.astype(x.q.dtype)


def _tokens(k: Array) -> Array:
    return jnp.arange(k.shape[0], dtype=jnp.int32)


def _all(k: Array, v: Array, end: Array, which: Array | bool = True) -> Near:
    """The keys before `end`, of these the ones that are wanted, of all."""
    token = _tokens(k)
    visible = (token < end) & which
    k, v = (jnp.where(visible[:, None], a, 0)[None] for a in (k, v))
    return Near(k, v, token[None], visible[None])


def _selected(x: Operands, spec: Spec) -> Near:
    """The keys of the selected blocks, gathered."""
    one = OneQuery(x.q[None], x.k, x.v, x.block_indices[None])
    return gathered(one, lists_of(one, spec)._replace(stop=x.sequence_end[None]), spec)


def _window(x: Operands, spec: Spec) -> Near:
    """The last keys, gathered where they are fewer than all."""
    if not is_less(spec.window, x.k.shape[0]):
        return _all_of_window(x, spec)
    position = x.sequence_end - spec.window + jnp.arange(spec.window, dtype=jnp.int32)
    visible, token = position >= 0, jnp.maximum(position, 0)
    k, v = (jnp.where(visible[:, None], a.at[token].get(mode="clip"), 0)[None] for a in (x.k, x.v))
    return Near(k, v, token[None], visible[None])


def _all_of_window(x: Operands, spec: Spec) -> Near:
    return _all(x.k, x.v, x.sequence_end, _tokens(x.k) >= x.sequence_end - spec.window)
