"""The parts of the keys that thread blocks attended to, and the sinks, merged by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.primitives.multi_latent_page_attention import Operands, Outputs

from .plan import Plan


def merged(o: Array, lse: Array, x: Operands, plan: Plan) -> Outputs:
    """The outputs of all parts, and the sinks, as one."""
    (B, T, H, R), dtype = x.q_latent.shape, x.q_latent.dtype
    o, lse = o.reshape(plan.splits, B, T, H, R), lse[:, 0].reshape(plan.splits, B, T, H)
    if plan.splits == 1 and x.sinks is None:
        return Outputs(o[0], lse[0])
    maximum = lse.max(0)
    sinks = -jnp.inf
    if x.sinks is not None:  # a token of no sequence has none
        sinks = jnp.where(is_of_a_sequence(x)[..., None], jax.nn.logsumexp(x.sinks, axis=-1)[:, None], -jnp.inf)
        maximum = jnp.maximum(maximum, sinks)
    maximum = jnp.where(jnp.isfinite(maximum), maximum, np.float32(0))
    factors = jnp.exp(lse - maximum)
    total = factors.sum(0) + jnp.exp(sinks - maximum)
    o = (o.astype(jnp.float32) * factors[..., None]).sum(0) / jnp.where(total == 0, np.float32(1), total)[..., None]
    return Outputs(o.astype(dtype), maximum + jnp.log(total))


def is_of_a_sequence(x: Operands) -> Array:
    """[b,t] bool, whether a token is of any sequence."""
    token = jnp.arange(x.q_latent.shape[1], dtype=jnp.int32)
    end = jnp.take_along_axis(x.query_start_loc, jnp.clip(x.num_seqs, 0, x.context_lens.shape[1]), 1)
    return (token >= x.query_start_loc[:, :1]) & (token < end)
