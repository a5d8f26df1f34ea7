"""native_sparse_attention as an operation: the primitive is its selected branch, flash_attention the other two."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32, Integer

from ...errors import value_error
from ...ops.execution.executor import Executor, call_context
from ...primitives.native_sparse_attention import NativeSparseAttentionSpec
from ...primitives.native_sparse_attention import native_sparse_attention as algorithm
from ...types import CuSeqlens, Scale, Window
from ...xla_utils.sequence_blocks import places
from .._operation import Operation, Prepared, platform_of_call
from ._arguments import (
    align,
    array,
    int32,
    require_dtype,
    require_known,
    size_of,
    static_bool,
    static_scale,
    window_pair,
)
from ._native_sparse import block_size_of, check_heads, check_values, compressed, cuts_of, gates_of
from .flash_attention import FlashAttention
from .native_sparse_blocks import NativeSparseBlocks, uneven_cuts

NAME = algorithm.name


def native_sparse_attention_arguments(
    q: Float[Array, "batch q_len q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"],
    g_cmp: Float[Array, "batch q_len q_heads"] | None = None,
    g_slc: Float[Array, "batch q_len q_heads"] | None = None,
    g_swa: Float[Array, "batch q_len q_heads"] | None = None,
    block_indices: Integer[Array, "batch q_len kv_heads blocks"] | None = None,
    cu_seqlens: CuSeqlens | None = None,
    *,
    block_counts: int = 16,
    block_size: int = 64,
    window: Window | None = None,
    softmax_scale: Scale | None = None,
    return_block_indices: bool = False,
) -> Prepared[
    Float[Array, "batch q_len q_heads v_head_dim"]
    | tuple[Float[Array, "batch q_len q_heads v_head_dim"], Int32[Array, "batch q_len kv_heads blocks"]]
]:
    """Native sparse attention: a gated sum of attention to means of blocks, to selected blocks, and to a window.

        o_i = g_cmp_i · cmp_i + g_slc_i · slc_i + g_swa_i · swa_i

    Each branch is softmax attention with logits softmax_scale · q_i·k_j over its own keys. With i' = i + K − S:

    cmp, compressed: the mean keys and values of the blocks of block_size tokens that have ended at or before the query,
        (x + 1) · block_size ≤ i' + 1. It is left out where g_cmp is not given.
    slc, selected: the keys j ≤ i' of the blocks in block_indices. Where these are not given they are those of
        `native_sparse_blocks`: the own block, the first, and the others of the highest compressed weights, summed over
        the query heads that share keys. Where g_slc is not given it is 1.
    swa, sliding window: the last `window` keys. It is left out where no window is given, and g_swa is then 1 if not
        given.

    Differentiable in q, k, v, the gates and a traced softmax_scale, to any order; the choice of the blocks is constant.
    Memory grows with S and K, time with S · (block_counts · block_size + window), and with S · K / block_size for the
    compressed branch and the choice.

    Args:
        q: queries [B, S, H, D].
        k: keys [B, K, G, D]; H is a multiple of G.
        v: values [B, K, G, V]. q, k and v have one float dtype.
        g_cmp: gates [B, S, H] of the compressed branch, of any float dtype; not bounded.
        g_slc: gates [B, S, H] of the selected branch.
        g_swa: gates [B, S, H] of the window branch, with `window` only.
        block_indices: [B, S, G, n] integers, the selected blocks: negative indices are skipped, a block after the query
            has no visible key, and a block that is listed twice counts once.
        cu_seqlens: [N + 1] integers that divide the tokens, of a batch of 1 and S = K, into sequences: positions and
            blocks are counted within each. May be traced.
        block_counts: the number of blocks of a query if block_indices are not given.
        block_size: the number of tokens in a block.
        window: (left, right): keys i' − left ≤ j ≤ min(i' + right, i'), None is unbounded; an int w is (w − 1, 0).
        softmax_scale: D**-0.5 by default; a number, or a traced scalar.
        return_block_indices: also return the blocks.

    Returns:
        o [B, S, H, V] in q's dtype, with block_indices [B, S, G, n] int32 if asked for. A branch in which a query sees
        no key contributes 0; tokens of no sequence have o = 0 and gradients 0. A config, and the labels of kernels,
        refer to the selected branch.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    Native sparse attention, arXiv 2502.11089.
    """
    q, k, v = array(NAME, "q", q), array(NAME, "k", k), array(NAME, "v", v)
    check_heads(NAME, q=q, k=k)
    check_values(NAME, q, k, v)
    gates = gates_of(NAME, q, g_cmp=g_cmp, g_slc=g_slc, g_swa=g_swa)
    window = None if window is None else window_pair(NAME, window)
    if window is None and g_swa is not None:
        raise value_error(NAME, "g_swa is given without a window; it is the gate of that branch", g_swa=g_swa)
    cuts, size = cuts_of(NAME, cu_seqlens, q, k), block_size_of(NAME, block_size, k)
    counts = size_of(NAME, "block_counts", block_counts)
    return_block_indices = static_bool(NAME, "return_block_indices", return_block_indices)
    packed = {} if cuts is None else {"cu_seqlens": cuts}
    lists = {} if block_indices is None else {"block_indices": _lists(block_indices, q, k)}
    named = align(algorithm.forward, dict(q=q, k=k, v=v, **lists, **packed))
    inside = _inside(q, k, cuts)
    named["q"], scale = _scale(named["q"], softmax_scale, inside)
    branches = _other_branches(named, gates, size, window, scale)
    if isinstance(scale, jax.Array):
        named, scale = named | _scaled(named["q"], named["k"], scale), 1.0
    if block_indices is None:
        options = dict(block_counts=counts, block_size=size, softmax_scale=scale)
        of = [jax.lax.stop_gradient(named[name]) for name in ("q", "k")]
        executor = call_context().executor
        named["block_indices"] = _run(executor, NativeSparseBlocks, *of, *(x[0] for x in packed.values()), **options)
        named = align(algorithm.forward, named)

    def finish(out: Mapping[str, Any]):
        o = _gated(out["o"], gates["g_slc"], inside, branches)
        return (o, named["block_indices"]) if return_block_indices else o

    return Prepared(named, NativeSparseAttentionSpec(size, scale), finish)


# --- Checks ----------------------------------------------------------------------------------------------------------


def _lists(x: Any, q: Any, k: Any) -> Any:
    x = array(NAME, "block_indices", x)
    require_dtype(NAME, np.integer, "an integer type", block_indices=x)
    wanted = (*q.shape[:2], k.shape[2])
    if len(x.shape) != 4 or x.shape[:3] != wanted:
        rule = f"block_indices must be {list(wanted)} and a list of blocks, of each query and key/value head"
        raise value_error(NAME, rule, q=q, k=k, block_indices=x)
    require_known(NAME, "the number of blocks in a list", x.shape[3], block_indices=x)
    return int32(x)


def _scale(q: Any, scale: Any, inside: Any) -> tuple[Any, float | Array]:
    """q and the scale, a number or a traced array. For the latter q is 0 in tokens that see nothing.

    They may be NaN, and so would be their product with a cotangent of 0 in the gradient of the scale.
    """
    dtype = np.promote_types(q.dtype, np.float32)
    if scale is None:
        require_known(NAME, "the number of features, of which softmax_scale is a power,", q.shape[-1], q=q)
        return q, q.shape[-1] ** -0.5
    if not isinstance(scale, jax.Array):
        return q, static_scale(NAME, scale, dtype)
    if scale.shape != ():
        raise value_error(NAME, "softmax_scale must be a scalar", softmax_scale=scale)
    require_dtype(NAME, np.floating, "a float type", softmax_scale=scale)
    return jnp.where(inside[..., None], q, jnp.zeros((), q.dtype)), scale.astype(dtype)


def _scaled(q: Array, k: Array, scale: Array) -> dict[str, Array]:
    """q and k whose products are the logits, as the primitive of the selected branch has no operand for a scale.

    In half precision, scale · q is the sum of two numbers, as one would be rounded by 2⁻⁹ and large logits by more than
    their products are. They are twice as many features of q, and those of k are repeated.
    """
    wide = q.astype(scale.dtype) * scale
    high = wide.astype(q.dtype)
    if q.dtype == scale.dtype:
        return dict(q=high, k=k)
    low = (wide - high.astype(scale.dtype)).astype(q.dtype)
    return dict(q=jnp.concatenate([high, low], axis=-1), k=jnp.concatenate([k, k], axis=-1))


def _inside(q: Any, k: Any, cuts: Any) -> Any:
    """[1, s, 1] bool: the tokens of some sequence, and the queries that do not stand before all keys."""
    return (places(None if cuts is None else cuts[0], q.shape[1], k.shape[1]).stop > 0)[None, :, None]


# --- The other branches, and their sum --------------------------------------------------------------------------------


def _run(executor: Executor, operation: type[Operation], *args: Any, **options: Any) -> Any:
    """Calls an operation with the arguments of the lax API and `platform`."""
    return executor.call(lambda: operation.invocation(*args, **options))


def _other_branches(
    named: Mapping[str, Any], gates: Mapping[str, Any], size: int, window: Any, scale: float | Array
) -> list[tuple[Any, Callable[[], Any]]]:
    """(gate, function that computes the branch) for each branch besides the selected one; a gate of None is 1."""
    q, k, v = (named[name] for name in "qkv")
    cuts, executor, found = named.get("cu_seqlens"), call_context().executor, []
    options = dict(causal=True, softmax_scale=scale, platform=platform_of_call())

    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, **more):
        cu_seqlens = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        return _run(executor, FlashAttention, q, k, v, **cu_seqlens, **options, **more)

    def windowed():
        if cuts is None:
            return attend(q, k, v, None, None, window=window)
        return attend(q[0], k[0], v[0], cuts[0], cuts[0], window=window)[None]

    if gates["g_cmp"] is not None:
        found.append((gates["g_cmp"], lambda: compressed(attend, q, k, v, cuts, size)))
    if window is not None:
        found.append((gates["g_swa"], windowed))
    return found


def _gated(o: Any, g_slc: Any, inside: Any, branches: Sequence[tuple[Any, Callable[[], Any]]]) -> Any:
    """Σ gate · o over the branches, in the dtype of statistics. Gates of tokens that see nothing may be NaN."""
    if g_slc is None and not branches:
        return o
    dtype = np.promote_types(o.dtype, np.float32)

    def weighted(gate, of):
        if gate is None:
            return of.astype(dtype)
        gate = jnp.where(inside, gate.astype(dtype), jnp.zeros((), dtype))
        return gate[..., None] * of.astype(dtype)

    total = weighted(g_slc, o)
    for gate, branch in branches:
        total = total + weighted(gate, branch())
    return total.astype(o.dtype)


class NativeSparseAttention(Operation):
    """Attention to means of blocks, to selected blocks and to a window: `ejkernel.lax.native_sparse_attention`."""

    algorithm = algorithm
    prepare_arguments = staticmethod(native_sparse_attention_arguments)
    renamed: ClassVar = {"window": "sliding_window", "cu_seqlens": "cum_seqlens"}

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with both of its two blocks selected."""
        q, kv = (jax.ShapeDtypeStruct((1, 128, heads, 64), jnp.bfloat16) for heads in (16, 1))
        return dict(q=q, k=kv, v=kv, block_indices=jax.ShapeDtypeStruct((1, 128, 1, 2), jnp.int32))

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Random arrays; uneven sequences; lists of the query's own block, the first, and some in between."""
        values, q, k = super().synthetic_operands(operands, spec), operands["q"], operands["k"]
        (_, s, _, n), t = operands["block_indices"].shape, k.shape[1]
        if (cuts := operands.get("cu_seqlens")) is not None:
            values["cu_seqlens"] = uneven_cuts(s, cuts)
        own = (jnp.arange(s, dtype=jnp.int32) + max(0, t - s))[:, None] // spec.block_size
        shares = jax.random.uniform(jax.random.key(0), (s, n)).at[:, :2].set(jnp.array([1.0, 0.0])[:n])
        lists = jnp.floor(shares * own).astype(jnp.int32)[None, :, None]
        return values | {"block_indices": jnp.broadcast_to(lists, (*q.shape[:2], k.shape[2], n))}

    @classmethod
    def flops(cls, named: Mapping[str, Any], results: Sequence[str], spec: Any) -> float | None:
        """None, since values decide which keys are visible."""
        return None
