"""flash_mla beside flash_attention of keys and values that are in memory: what their projections cost."""

from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel import lax
from ejkernel.modules import flash_mla
from ejkernel.types.shapes.flash_mla import MlaShape

from . import _referee
from ._contenders import Inputs, arrays_of, call, normal, of_ours
from ._driver import Case
from ._harness import Check, Contender, Prepared, queued

_HEADS_AT_ONCE = 8  # by the referee


def case(shape: MlaShape, mode: str, dtype: Any, platforms: Sequence[str]) -> Case:
    """One layer in one mode."""
    given = _inputs(shape, dtype)
    ours = of_ours(
        "flash_mla", platforms, lambda platform: partial(flash_mla, causal=True, platform=platform), mode, given
    )
    (rival,) = shape.rivals
    expanded = Contender(rival, lambda: _expanded(shape, mode, given))
    return Case([*ours, expanded], cache(partial(_check, shape, mode, given)))


@lru_cache(maxsize=1)
def _inputs(shape: MlaShape, dtype: Any) -> Inputs:
    """Standard normal arrays, the projections such that keys and values are about standard normal, too."""
    arrays = arrays_of(shape, dtype)
    for name in ("w_kc", "w_vc"):
        arrays[name] = (arrays[name].astype(jnp.float32) * shape.latent**-0.5).astype(dtype)
    result, *keys = jax.random.split(jax.random.key(1), 1 + len(arrays))
    tangents = tuple(normal(key, x.shape, dtype) for key, x in zip(keys, arrays.values(), strict=True))
    cotangent = normal(result, (shape.batch, shape.seq_q, shape.heads, shape.value_dim), dtype)
    return Inputs(tuple(arrays.values()), cotangent, tangents)


def _keys_and_values(c: Array, r: Array, w: Array, u: Array) -> tuple[Array, Array]:
    """Keys and values of all heads, from latents c and rotary parts r by projections w and u."""
    heads = lambda w: jnp.einsum("bkr,rhd->bkhd", c, w)
    k = heads(w)
    return jnp.concatenate([k, jnp.broadcast_to(r[:, :, None], (*k.shape[:3], r.shape[-1]))], -1), heads(u)


def _expanded(shape: MlaShape, mode: str, given: Inputs) -> Prepared:
    """flash_attention alone; what lies before and behind it is computed once, for the check of its numbers."""
    (q, *latents), (dq, *of_latents) = given.operands, given.tangents
    keys, tangents = jax.jit(partial(jax.jvp, _keys_and_values))(tuple(latents), tuple(of_latents))
    attend = call(partial(lax.flash_attention, causal=True), mode)
    program = jax.jit(attend).lower((q, *keys), (dq, *tangents), given.cotangent).compile()
    arguments = (q, *keys), (dq, *tangents), given.cotangent
    results = list(program(*arguments))
    if mode in ("bwd", "fwd_bwd"):
        *before, dk, dv = results
        results = [*before, *jax.jit(lambda x, d: jax.vjp(_keys_and_values, *x)[1](d))(tuple(latents), (dk, dv))]
    return Prepared(jax.block_until_ready(results), queued(program, *arguments))


def _check(shape: MlaShape, mode: str, given: Inputs) -> Check:
    """Judges all results, by the formula of each head of each sequence."""
    visible = lambda i: jnp.arange(shape.seq_k) <= i + shape.seq_k - shape.seq_q
    attend = partial(_referee.attention, visible=visible, scale=(shape.nope + shape.rope) ** -0.5)

    def formula(q: Array, c: Array, r: Array, w: Array, u: Array) -> Array:
        dtype, wide = q.dtype, jnp.promote_types(q.dtype, jnp.float32)
        c, r, w, u = (x.astype(wide) for x in (c, r, w, u))  # so that their gradients are summed in `wide`

        def of_head(x: tuple[Array, ...]) -> Array:
            b, h = x
            k, v = (jnp.dot(c[b], w[:, h], preferred_element_type=wide).astype(dtype) for w in (w, u))
            k = jnp.concatenate([k, r[b].astype(dtype)], -1)
            return attend(q[b, :, h][:, None], k, v)[:, 0]

        b, h = jnp.indices((shape.batch, shape.heads)).reshape(2, -1)
        o = jax.lax.map(of_head, (b, h), batch_size=_HEADS_AT_ONCE)
        return jnp.moveaxis(o.reshape(shape.batch, shape.heads, *o.shape[1:]), 1, 2)

    def results(dtype: Any) -> Sequence[Array]:
        arrays = jax.tree.map(lambda x: jnp.asarray(x, dtype), (given.operands, given.tangents, given.cotangent))
        return jax.jit(call(formula, mode))(*arrays)

    return _referee.check(list, results, given.cotangent.dtype)
