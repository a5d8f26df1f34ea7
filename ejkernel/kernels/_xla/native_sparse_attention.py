"""native_sparse_attention in plain JAX: a chunk of queries at a time, each with the gathered keys of its blocks.

For query i and the keys j that it sees, with logits s_ij = scale · q_i·k_j:

    lse_i = log Σ_j exp s_ij        p_ij = exp(s_ij − lse_i)        o_i = Σ_j p_ij v_j

With the cotangents do and dlse, and because ∂lse_i / ∂s_ij = p_ij and ∂p_ij / ∂s_ij' = p_ij (δ_jj' − p_ij'):

    dp_ij = do_i·v_j                ds_ij = p_ij (dp_ij − Σ_j' p_ij' dp_ij' + dlse_i)
    dq_i = scale Σ_j ds_ij k_j      dk_j = scale Σ_i ds_ij q_i      dv_j = Σ_i p_ij do_i

The sums over i run over the queries that see j, with all heads of its group; a chunk of queries adds its terms to the
rows of the keys. The tangents are:

    ṡ_ij = scale (q̇_i·k_j + q_i·k̇_j)          l̇se_i = Σ_j p_ij ṡ_ij          ȯ_i = Σ_j p_ij ((ṡ_ij − l̇se_i) v_j + v̇_j)

Backward and tangent compute all the logits of a row at once, and so normalise its weights as the forward does, without
lse: near 10¹² that is rounded by more than the largest exponent of float32.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig, Target
from ejkernel.xla_utils.sequence_blocks import places

from .._registry import Backend, Platform, configured_by, kernel_registry
from ._attention import statistics_dtype
from ._chunks import in_chunks
from ._gathered_keys import (
    gathered,
    lists_of,
    logits_of,
    lse_of,
    not_zero,
    of_live,
    over_keys,
    product,
    rows_of,
    softmax_of,
    weights_of,
)
from ._tiles import varying_like

# The most elements of the keys and values that are gathered for a chunk of queries.
_MOST_GATHERED = {"cpu": 2**20}, 2**24


def heuristic(spec: NativeSparseAttentionSpec, operands: Operands, target: Target) -> KernelConfig:
    """As many queries at a time as keep the gathered keys within the cache of a CPU, or small elsewhere."""
    (b, s, _, d), (*_, g, e), n = operands.q.shape, operands.v.shape, operands.block_indices.shape[3]
    of_devices, otherwise = _MOST_GATHERED
    most = of_devices.get(target.platform, otherwise)
    of_query = b * g * n * spec.block_size * (d + e)
    return KernelConfig(block_q=int(max(1, min(s, 512, most // max(1, of_query)))), block_k=spec.block_size)


def space(spec: NativeSparseAttentionSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    """The config of the heuristic alone."""
    return [heuristic(spec, operands, target)]


def reference(*operands: Any, spec: NativeSparseAttentionSpec = NativeSparseAttentionSpec()) -> Outputs:
    """The formula, with a mask of the size of the logits; products are in the precision of the inputs."""
    x = Operands(*operands)
    o, lse = _of_each(partial(_reference, spec=spec), x, (), ())
    return _outputs(o.astype(x.q.dtype), lse)


def _reference(x: Operands, *, spec: NativeSparseAttentionSpec) -> tuple[Array, Array]:
    (s, t), size = (x.q.shape[0], x.k.shape[0]), spec.block_size
    place, token = places(x.cu_seqlens, s, t), jnp.arange(t, dtype=jnp.int32)[None]
    position = token - place.first[:, None]
    listed = (x.block_indices[:, None] == (position // size)[..., None]).any(-1)
    visible = listed & (position >= 0) & (position < place.stop[:, None])
    k, v = (jnp.where(visible.any(0)[:, None], of, 0) for of in (x.k, x.v))
    q = jnp.where(visible.any(1)[:, None, None], x.q, 0)
    logits = jnp.where(visible[:, None], spec.softmax_scale * product("srd,td->srt", q, k), -jnp.inf)
    m, weights, total = softmax_of(logits)
    return product("srt,te->sre", (weights / not_zero(total)).astype(v.dtype), v), lse_of(m, total)[..., 0]


# --- The three primitives --------------------------------------------------------------------------------------------


@kernel_registry.register("native_sparse_attention", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
def native_sparse_attention(
    *operands: Array | None,
    spec: NativeSparseAttentionSpec = NativeSparseAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The results o and lse of native_sparse_attention, in XLA."""
    return _outputs(*_of_each(partial(_forward, spec=spec, size=config.block_q), Operands(*operands), (), ()))


@kernel_registry.register("native_sparse_attention_jvp", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
def native_sparse_attention_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: NativeSparseAttentionSpec = NativeSparseAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The tangents of o and lse; a tangent of None is zero."""
    run = partial(_tangent, spec=spec, size=config.block_q)
    return _outputs(*_of_each(run, primals, (tangents.q,), (tangents.k, tangents.v)))


@kernel_registry.register("native_sparse_attention_bwd", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
def native_sparse_attention_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: NativeSparseAttentionSpec = NativeSparseAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt; a cotangent of None is zero."""
    run = partial(_backward, wrt=wrt, spec=spec, size=config.block_q)
    rows = (cotangents.o, None if cotangents.lse is None else _by_row(cotangents.lse))
    found = _of_each(run, primals, rows, ())
    back = {"q": _ungrouped, "k": _with_keys, "v": _with_keys}
    return tuple(back[name](of) for name, of in zip(wrt, found, strict=True))


# --- One key/value head of one element: q [s,r,d], k [t,d], v [t,e], block_indices [s,n] ----------------------------


def _of_each(f: Callable[..., Any], x: Operands, rows: Sequence[Array | None], keys: Sequence[Array | None]) -> Any:
    """f(operands, *rows, *keys) of each: [b,g,…] of its results, where rows are [b,s,h,…] and keys [b,t,g,…]."""
    groups, cu_seqlens = x.k.shape[2], x.cu_seqlens
    shared = cu_seqlens is not None and cu_seqlens.shape[0] == 1
    cu_seqlens = cu_seqlens[0] if shared else cu_seqlens
    by_group = lambda of, *arrays: [None if a is None else of(a) for a in arrays]
    q, *rows = by_group(partial(_grouped, groups=groups), x.q, *rows)
    k, v, blocks, *keys = by_group(_with_keys, x.k, x.v, x.block_indices, *keys)
    given = Operands(q, k, v, blocks, cu_seqlens)
    rest = [0] * (len(rows) + len(keys))
    of_batch = jax.vmap(f, in_axes=(Operands(0, 0, 0, 0, None), *rest))
    return jax.vmap(of_batch, in_axes=(Operands(0, 0, 0, 0, None if shared else 0), *rest))(given, *rows, *keys)


def _grouped(x: Array, groups: int) -> Array:
    """Groups the heads that share a key/value head, [b,s,h,…] -> [b,g,s,r,…]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], groups, x.shape[2] // groups, *x.shape[3:]), 2, 1)


def _ungrouped(x: Array) -> Array:
    """The inverse of `_grouped`, [b,g,s,r,…] -> [b,s,h,…]."""
    x = jnp.moveaxis(x, 1, 2)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


def _with_keys(x: Array) -> Array:
    """Exchanges tokens and heads of keys, [b,t,g,…] <-> [b,g,t,…]."""
    return jnp.swapaxes(x, 1, 2)


def _by_row(x: Array) -> Array:
    """Exchanges heads and queries, [b,h,s] <-> [b,s,h]."""
    return jnp.swapaxes(x, 1, 2)


def _outputs(o: Array, lse: Array) -> Outputs:
    return Outputs(_ungrouped(o), _by_row(_ungrouped(lse)))


def _forward(x: Operands, *, spec: NativeSparseAttentionSpec, size: int) -> tuple[Array, Array]:
    def chunk(_, q, lists):
        near = gathered(x, lists, spec)
        m, weights, total = softmax_of(logits_of(q, near, spec))
        return _, ((over_keys(weights, near.v) / not_zero(total)).astype(q.dtype), lse_of(m, total)[..., 0])

    return in_chunks(chunk, (), (x.q, lists_of(x, spec)), size)[1]


def _tangent(x: Operands, dq, dk, dv, *, spec: NativeSparseAttentionSpec, size: int) -> tuple[Array, Array]:
    def chunk(_, q, dq, lists):
        near = gathered(x, lists, spec)
        p = weights_of(q, near, spec)
        ds = jnp.zeros_like(p)
        if dq is not None:
            ds += spec.softmax_scale * product("crd,cmd->crm", of_live(dq, near), near.k)
        if dk is not None:
            ds += spec.softmax_scale * product("crd,cmd->crm", of_live(q, near), rows_of(dk, near))
        dlse = (p * ds).sum(-1, keepdims=True)
        do = over_keys(p * (ds - dlse), near.v)
        if dv is not None:
            do += over_keys(p, rows_of(dv, near))
        return _, (do.astype(q.dtype), dlse[..., 0])

    return in_chunks(chunk, (), (x.q, dq, lists_of(x, spec)), size)[1]


def _backward(x: Operands, do, dlse, *, wrt: tuple[str, ...], spec: NativeSparseAttentionSpec, size: int):
    def chunk(totals, q, do, dlse, lists):
        near = gathered(x, lists, spec)
        p = weights_of(q, near, spec)
        ds = jnp.zeros_like(p)
        if do is not None:
            do = of_live(do, near)
            ds += product("cre,cme->crm", do, near.v)
            ds -= (p * ds).sum(-1, keepdims=True)
        if dlse is not None:
            ds += of_live(dlse[..., None], near)
        ds = (p * ds * spec.softmax_scale).astype(q.dtype)
        of_keys = {}
        if "k" in totals:
            of_keys["k"] = product("crm,crd->cmd", ds, of_live(q, near))
        if "v" in totals:
            of_keys["v"] = product("crm,cre->cme", p.astype(q.dtype), do)
        totals = {name: totals[name].at[near.token].add(of) for name, of in of_keys.items()}
        return totals, product("crm,cmd->crd", ds, near.k).astype(q.dtype) if "q" in wrt else None

    asked = {"k": x.k, "v": None if do is None else x.v}
    totals = {
        n: jnp.zeros(of.shape, statistics_dtype(of.dtype)) for n, of in asked.items() if n in wrt and of is not None
    }
    rows = (x.q, do, dlse, lists_of(x, spec))
    totals, dq = in_chunks(chunk, varying_like((x, rows), totals), rows, size)
    found = {"q": dq} | {name: of.astype(x.q.dtype) for name, of in totals.items()}
    return [found[name] if name in found else jnp.zeros_like(getattr(x, name)) for name in wrt]
