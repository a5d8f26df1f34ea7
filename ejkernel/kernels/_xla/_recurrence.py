"""The linear recurrence in XLA: the reference, token by token, and the decomposition that is lowered, chunk by chunk.

A block of tokens i, j = 1 … c that begins in the state h is computed at once: an inter-chunk part, from h, and an
intra-chunk part, from pairs of tokens. With one decay g that stands for those of heads and of features

    o_i = scale q_iᵀ (exp(P_i) h + Σ_{j≤i} exp(D_ij) k_j v_jᵀ),    h' = exp(P_c) h + Σ_j exp(D_cj) k_j v_jᵀ
    D_ij = Σ_{j<l≤i} g_l,    P_i = Σ_{l≤i} g_l

Each D_ij is a sum of its own and not the difference P_i − P_j, whose error would be that of the longest sum. It is at
most 0 where decays are, so that nothing overflows however fast they are.

A decay of each feature makes D a [c, c, d]: blocks are short then, and a chunk is several of them. Of the forward,
gradients keep only the chunk states and compute the rest again, so that memory is linear in the sequence, at any order
of differentiation.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.kernels._registry import configured_by, kernel_registry
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ejkernel.types import Backend, KernelConfig, Platform, Target
from ejkernel.xla_utils.symbolic import at_most

from ._attention import statistics_dtype, where
from ._tiles import varying_like
from ._token_chunks import chunks_of, cut, joined

# --- The formula ------------------------------------------------------------------------------------------------------


def reference(*operands: Array | None, spec: RecurrenceSpec = RecurrenceSpec()) -> Outputs:
    """The formula: one step for each token, in float32 or, where the inputs are, in float64."""
    x = Operands(*operands)
    dtype, heads = statistics_dtype(x.q.dtype), x.q.shape[2]
    first, after = jnp.moveaxis(_spans(x), -1, 0)[..., None]
    token = jnp.arange(x.q.shape[1], dtype=np.int32)[None, None]
    owner = jnp.moveaxis((first <= token) & (token < after), 2, 0)  # [s,b?,n]
    in_sequence = jnp.moveaxis(owner.any(-1), 0, 1)

    def steps(a, heads_axis=False):
        """[s,b,…], 0 for tokens of no sequence; a key/value head once for each of its query heads."""
        a = jnp.where(lax.expand_dims(in_sequence, range(2, a.ndim)), a.astype(dtype), 0)
        a = jnp.repeat(a, heads // a.shape[2], axis=2) if heads_axis else a
        return jnp.moveaxis(a, 1, 0)

    gates = (None if a is None else steps(a) for a in (_gates_of_heads(x, dtype), x.gk, x.gv))
    tokens = (steps(x.q), steps(x.k, True), steps(x.v, True), *gates, owner)

    def step(states, of_token):
        q, k, v, g, gk, gv, owner = of_token
        owner = lax.expand_dims(owner, (2, 3, 4))
        h = jnp.where(owner, states, 0).sum(1)
        for gate, axes in ((g, (2, 3)), (gk, (3,)), (gv, (2,))):
            h = h if gate is None else h * jnp.exp(lax.expand_dims(gate, axes))
        h = h + k[..., None] * v[:, :, None]
        o = jnp.einsum("bhd,bhde->bhe", q * spec.softmax_scale, h, precision="highest")
        return jnp.where(owner, h[:, None], states), o

    final_state, o = lax.scan(step, _initial_state(x, dtype), tokens, reverse=spec.reverse)
    return Outputs(jnp.moveaxis(o, 0, 1).astype(x.q.dtype), final_state)


def _spans(x: Operands) -> Array:
    """[b?,n,2]: those given, or one of all tokens."""
    return jnp.array([[[0, x.q.shape[1]]]], np.int32) if x.spans is None else x.spans


def _gates_of_heads(x: Operands, dtype: Any) -> Array | None:
    """g + g_gamma [b,s,h], None where both are absent."""
    if x.g_gamma is None:
        return None if x.g is None else x.g.astype(dtype)
    gamma = jnp.broadcast_to(x.g_gamma.astype(dtype)[:, None], x.q.shape[:3])
    return gamma if x.g is None else gamma + x.g.astype(dtype)


def _initial_state(x: Operands, dtype: Any) -> Array:
    """[b,n,h,d,e]."""
    if x.initial_state is not None:
        return x.initial_state.astype(dtype)
    (b, _, h, d), e, n = x.q.shape, x.v.shape[-1], _spans(x).shape[1]
    return varying_like(x, lax.full((b, n, h, d, e), 0, dtype))


# --- Forward ----------------------------------------------------------------------------------------------------------


def heuristic(spec: RecurrenceSpec, operands: Operands, target: Target) -> KernelConfig:
    """block_q is a chunk, block_k a block. A decay of each feature costs block_k numbers a token and feature."""
    return KernelConfig(block_q=64, block_k=64 if _decays_by_head(operands) else 16)


def space(spec: RecurrenceSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    """Longer chunks keep less and compute more again. On a CPU only the heuristic one."""
    if target.platform == "cpu":
        return [heuristic(spec, operands, target)]
    blocks = (32, 64, 128) if _decays_by_head(operands) else (8, 16)
    return [KernelConfig(block_q=block_q, block_k=block_k) for block_q in (64, 128, 256) for block_k in blocks]


def _decays_by_head(operands: Operands) -> bool:
    return operands.gk is None and operands.gv is None


@configured_by(heuristic, space)
@partial(jax.jit, static_argnames=("spec", "config"))
def recurrence(
    *operands: Array | None, spec: RecurrenceSpec = RecurrenceSpec(), config: KernelConfig = KernelConfig()
) -> Outputs:
    """o and the final state, chunk by chunk."""
    x = Operands(*operands)
    dtype, length = statistics_dtype(x.q.dtype), x.q.shape[1]
    states = _initial_state(x, dtype)
    if x.q.size == 0:  # no token, so that nothing leads from one state to another
        return Outputs(varying_like(x, jnp.zeros((*x.q.shape[:3], x.v.shape[-1]), x.q.dtype)), states)
    block = max(1, at_most(min(config.block_k, config.block_q), length))
    blocks = max(1, at_most(config.block_q // block, -(-length // block)))
    chunks = chunks_of(x, spec, block * blocks)
    tokens = (x.q, x.k, x.v, _gates_of_heads(x, dtype), x.gk, x.gv)
    tokens = tuple(None if a is None else cut(a, chunks) for a in tokens)
    one_block = partial(_block, dtype, spec.softmax_scale)

    @jax.checkpoint
    def chunk(state, of_chunk):
        tokens, begins, initial = of_chunk
        if begins is not None:
            state = jnp.where(begins, initial, state)
        if blocks == 1:
            state, o = one_block(state, tokens)
        else:
            state, o = lax.scan(jax.checkpoint(one_block), state, _divided(tokens, blocks))
            o = jnp.moveaxis(o, 0, 2).reshape(*o.shape[1:3], blocks * block, -1)
        return state, (o.astype(x.q.dtype), None if begins is None else state)

    if x.spans is None:
        state, (o, _) = lax.scan(chunk, states[:, 0], (tokens, None, None))
        return Outputs(joined(o, chunks, length), state[:, None])
    b, n = states.shape[:2]
    of_rows = lambda a: jnp.broadcast_to(a, (b, *a.shape[1:]))
    initial = jnp.moveaxis(_taken(states, of_rows(chunks.begins)), 1, 0)
    begins = lax.expand_dims(jnp.moveaxis(chunks.begins < n, 1, 0), (2, 3, 4))
    _, (o, after) = lax.scan(chunk, jnp.zeros_like(states[:, 0]), (tokens, begins, initial))
    last = of_rows(chunks.last)
    final = _taken(jnp.moveaxis(after, 0, 1), jnp.where(last < 0, chunks.count, last))
    return Outputs(joined(o, chunks, length), jnp.where(lax.expand_dims(last >= 0, (2, 3, 4)), final, states))


def _taken(states: Array, index: Array) -> Array:
    """states[b, index[b, i]], 0 beyond the last."""
    return jax.vmap(lambda a, i: a.at[i].get(mode="fill", fill_value=0))(states, index)


def _divided(tokens: tuple, blocks: int) -> tuple:
    """[b,h,size,…] -> [blocks,b,h,block,…]."""
    return jax.tree.map(
        lambda a: jnp.moveaxis(a.reshape(*a.shape[:2], blocks, a.shape[2] // blocks, *a.shape[3:]), 2, 0), tokens
    )


class _Decay(NamedTuple):
    """The exponentials of the sums of a gate over a block, None where the gate is absent.

    between: exp(D_ij) at [:,:,i,j], 1 for j ≥ i. since: exp(P_i) at i. until: exp(D_cj) at j. total: exp(P_c).
    """

    between: Array | None = None
    since: Array | None = None
    until: Array | None = None
    total: Array | None = None


def _decay(gate: Array | None, dtype: Any) -> _Decay:
    """Of a gate [b,h,c,…]."""
    if gate is None:
        return _Decay()
    gate = gate.astype(dtype)
    after = np.tri(gate.shape[2], k=-1, dtype=bool)  # token l stands after token j
    terms = jnp.broadcast_to(gate[:, :, :, None], (*gate.shape[:3], gate.shape[2], *gate.shape[3:]))
    after = after.reshape(1, 1, *after.shape, *(1,) * (gate.ndim - 3))
    between = lax.cumsum(where(after, terms, 0), axis=2)
    since = between[:, :, :, 0] + gate[:, :, :1]
    return _Decay(*map(jnp.exp, (between, since, between[:, :, -1], since[:, :, -1])))


def _block(dtype: Any, scale: float, state: Array, tokens: tuple) -> tuple[Array, Array]:
    """The state [b,h,d,e] after a block, and o [b,h,c,e]; the equations stand at the head of this file."""
    q, k, v, *gates = tokens
    heads = q.shape[1]
    q = q.astype(dtype) * scale
    k, v = (jnp.repeat(a.astype(dtype), heads // a.shape[1], axis=1) for a in (k, v))
    of_head, of_key, of_value = (_decay(gate, dtype) for gate in gates)
    if of_key.between is None:
        weights = _product("bhid,bhjd->bhij", q, k)
    else:
        weights = (q[:, :, :, None] * k[:, :, None] * of_key.between).sum(-1)
    weights = _times(weights, of_head.between)
    weights = where(np.tri(q.shape[2], dtype=bool)[None, None], weights, 0)
    if of_value.between is None:
        o = _product("bhij,bhje->bhie", weights, v)
    else:
        o = (weights[..., None] * v[:, :, None] * of_value.between).sum(3)
    q = _times(_times(q, of_key.since), of_head.since)
    o = o + _times(_product("bhid,bhde->bhie", q, state), of_value.since)
    k, v = _times(_times(k, of_key.until), of_head.until), _times(v, of_value.until)
    for total, axes in ((of_head.total, (2, 3)), (of_key.total, (3,)), (of_value.total, (2,))):
        state = state if total is None else state * lax.expand_dims(total, axes)
    return state + _product("bhjd,bhje->bhde", k, v), o


def _times(a: Array, decay: Array | None) -> Array:
    """a · decay, which may lack the last axes of a; a itself if there is none."""
    return a if decay is None else a * lax.expand_dims(decay, range(decay.ndim, a.ndim))


def _product(axes: str, a: Array, b: Array) -> Array:
    return jnp.einsum(axes, a, b, precision="highest")


# --- Tangent and backward ---------------------------------------------------------------------------------------------


@configured_by(heuristic, space)
@partial(jax.jit, static_argnames=("spec", "config"))
def recurrence_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: RecurrenceSpec = RecurrenceSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The tangents of o and the final state; a tangent of None is zero."""
    moving = {name: t for name, t in tangents._asdict().items() if t is not None}
    f = partial(_outputs_of, primals, spec, config)
    o, final_state = jax.jvp(f, ({name: getattr(primals, name) for name in moving},), (moving,))[1]
    return Outputs(o.astype(primals.q.dtype), final_state)


@configured_by(heuristic, space)
@partial(jax.jit, static_argnames=("wrt", "spec", "config"))
def recurrence_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: RecurrenceSpec = RecurrenceSpec(),
    config: KernelConfig = KernelConfig(),
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt; a cotangent of None is zero.

    Of Σ outputs ∘ cotangents, as `jax.vjp` compares their types: in a `shard_map` inside another, the type of what is
    computed does not tell any more over which axes it varies, while that of an argument does.
    """
    dtype = statistics_dtype(primals.q.dtype)

    def weighed(moving):
        pairs = zip(_outputs_of(primals, spec, config, moving), cotangents, strict=True)
        return sum((x * ct.astype(dtype)).sum() for x, ct in pairs if ct is not None)

    gradients = jax.grad(weighed)({name: getattr(primals, name) for name in wrt})
    return tuple(gradients[name] for name in wrt)


def _outputs_of(operands: Operands, spec: RecurrenceSpec, config: KernelConfig, moving: dict[str, Array]) -> Outputs:
    """The outputs in the dtype of statistics, as functions of the operands that move.

    Nothing is rounded on the way: a second derivative that is transposed last would round to the dtype of q what is
    summed with other terms, and where these are large and cancel, float16 overflows though the sum does not.
    """
    dtype, x = statistics_dtype(operands.q.dtype), operands._replace(**moving)
    wide = {name: a.astype(dtype) for name, a in x._asdict().items() if a is not None and name != "spans"}
    return recurrence(*x._replace(**wide), spec=spec, config=config)


def register(operation: str) -> None:
    """Registers the three as the implementation of an operation of this family."""
    for suffix, implementation in (("", recurrence), ("_jvp", recurrence_jvp), ("_bwd", recurrence_bwd)):
        kernel_registry.register(operation + suffix, Platform.XLA, Backend.ANY)(implementation)
