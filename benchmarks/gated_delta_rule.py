"""gated_delta_rule beside flash-linear-attention."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.modules import gated_delta_rule
from ejkernel.types.shapes.gated_delta_rule import GatedDeltaRuleShape

from . import _referee
from ._contenders import Inputs, arrays_of, call, imported, normal, of_ours, of_torch
from ._driver import Case
from ._harness import Check


def case(shape: GatedDeltaRuleShape, mode: str, dtype: Any, platforms: Sequence[str]) -> Case:
    """One layer in one mode."""
    given = _inputs(shape, dtype)
    ours = of_ours("gated_delta_rule", platforms, _ours, mode, given)
    (rival,) = shape.rivals
    return Case([*ours, of_torch(rival, partial(_fla, shape), mode, given)], cache(partial(_check, shape, mode, given)))


@lru_cache(maxsize=1)
def _inputs(shape: GatedDeltaRuleShape, dtype: Any) -> Inputs:
    """Standard normal arrays; beta is σ, and the log decay log σ, of standard normal numbers."""
    arrays = arrays_of(shape, dtype)
    arrays["beta"] = jax.nn.sigmoid(arrays["beta"].astype(jnp.float32)).astype(dtype)
    arrays["g"] = jax.nn.log_sigmoid(arrays["g"])
    return Inputs(tuple(arrays.values()), normal(jax.random.key(1), shape.sizes["v"], dtype))


def _ours(platform: str | None) -> Callable[..., Array]:
    return partial(gated_delta_rule, platform=platform)


def _fla(shape: GatedDeltaRuleShape) -> Callable[..., Any]:
    """Its q and k have as many heads as v, as models repeat them."""
    rule, repeats = imported("fla.ops.gated_delta_rule").chunk_gated_delta_rule, shape.heads // shape.qk_heads

    def forward(q: Any, k: Any, v: Any, beta: Any, g: Any) -> Any:
        q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
        return rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return forward


def _check(shape: GatedDeltaRuleShape, mode: str, given: Inputs) -> Check:
    """Judges the first sequence and the last head of q and k with its heads of v, by the rule in chunks in XLA.

    The unit of an error is that of the same in float32, rounded.
    """
    heads = shape.heads // shape.qk_heads
    part = lambda a: a[:1, :, -heads:] if a.shape[2] == shape.heads else a[:1, :, -1:]

    def exact(dtype: Any) -> Sequence[Array]:
        *operands, do = (jnp.asarray(part(a), dtype) for a in (*given.operands, given.cotangent))
        return jax.jit(call(_ours("xla"), mode))(tuple(operands), (), do)

    return _referee.check_by_rounding(lambda results: [part(a) for a in results], exact, given.cotangent.dtype)
